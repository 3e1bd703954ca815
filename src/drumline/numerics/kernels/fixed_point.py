"""The words of `drumline.numerics.exact_sum` in C++, in one pass over memory; the source is fixed_point.cpp."""

import ctypes
import functools
from fractions import Fraction
from math import floor

import torch
from torch import Tensor

from drumline.numerics.kernels.build import KernelError, load
from drumline.numerics.kernels.operators import mode


def words(library: ctypes.CDLL, x: Tensor, scale: float, width: int, squared: bool) -> tuple[int, int]:
    """The summed words of a tensor.

    Args:
        library: from `library()`.
        x: fp32 or bf16, any shape.
        scale: a power of two that brings all elements below 1.
        width: bits of a word.
        squared: sum the squares.

    Returns:
        (high, low).
    """
    x = x.contiguous()
    found = (ctypes.c_int64 * 2)()
    sizes = ctypes.c_int64(x.numel()), ctypes.c_double(scale), ctypes.c_double(2.0**width), int(squared)
    library.drumline_fixed_point(ctypes.c_void_p(x.data_ptr()), *sizes, *mode(x), found)
    return found[0], found[1]


@functools.cache
def library() -> ctypes.CDLL:
    """The built library; raises KernelError where it cannot be had."""
    return load("fixed_point", check=_check)


def _check(library: ctypes.CDLL) -> None:
    """Compare a fresh build with rational arithmetic, so that a miscompiled kernel is never used."""
    x = torch.randn(1003, generator=torch.Generator().manual_seed(0))
    for squared in (False, True):
        high = low = 0
        for value in x.tolist():
            y = (Fraction(value) / 8) ** (2 if squared else 1) * 2**38
            high += floor(y)
            low += floor((y - floor(y)) * 2**38)
        if words(library, x, 0.125, 38, squared) != (high, low):
            raise KernelError("the built kernel of sums in fixed point is wrong here: it differs from rational numbers")
