"""Sums whose bits depend on no order at all: fixed point against the largest magnitude of all.

With 2^k above every |x|, x is scaled to y = x 2^(WIDTH - k) and cut into two whole numbers,

    high = floor(y),   low = floor((y - high) 2^WIDTH),   x = (high + low 2^-WIDTH) 2^(k - WIDTH) up to 2^(k - 2 WIDTH)

All steps but the last floor are exact in fp64, for the square of an fp32 number, too, which has 48 bits. A piece has so
few elements that fp64 adds their words without rounding; pieces, and ranks, add as integers. So the result depends on
which numbers were summed, and not on who held them or in which order. What is cut off is less than 2^-75 of the largest
element for each element.
Source of the idea: Demmel and Nguyen 2013, ARITH 21, "Fast Reproducible Floating-Point Summation", section III.
"""

import math
from collections.abc import Iterable

import torch

from drumline.numerics.invariant.native import library
from drumline.numerics.kernels import fixed_point

WIDTH = 38
"""Bits of a word."""

_PIECE = 1 << 14  # 2^14 words of 38 bits and a sign stay below 2^53, and a piece in fp64 stays in the cache


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest magnitude, or nan where there is any; 0 of nothing.

    Args:
        tensors: any shapes.

    Returns:
        It, exact.
    """
    found = 0.0
    for x in tensors:
        if x.numel():
            low, high = (float(bound) for bound in torch.aminmax(x.detach()))
            found = max(found, abs(low), abs(high)) if not math.isnan(low + found) else math.nan
    return found


def words(tensors: Iterable[torch.Tensor], bound: float, *, squared: bool = False) -> tuple[int, int]:
    """The summed words of all elements, or of their squares.

    Args:
        tensors: fp32 or bf16, any shapes; whole numbers of fp64 are exact, too.
        bound: `largest` of all tensors of all ranks, finite.
        squared: sum the squares.

    Returns:
        (high, low): integers that add over ranks.
    """
    high = low = 0
    scale = 2.0 ** -exponent(bound)
    # A square has twice the exponent, so that the bound of squares is the square of the power that bounds.
    for x in tensors:
        built = library(fixed_point, x)
        if built is not None:
            found = fixed_point.words(built, x.detach(), scale, WIDTH, squared)
        else:
            found = _words(x, scale, squared)
        high += found[0]
        low += found[1]
    return high, low


def _words(x: torch.Tensor, scale: float, squared: bool) -> tuple[int, int]:
    high = low = 0
    for piece in x.detach().reshape(-1).split(_PIECE):
        y = piece.double().mul_(scale)
        y = (y.square_() if squared else y).mul_(2.0**WIDTH)
        whole = y.floor()
        rest = y.sub_(whole).mul_(2.0**WIDTH).floor_()
        high += int(whole.sum())
        low += int(rest.sum())
    return high, low


def value(words: tuple[int, int], bound: float, *, squared: bool = False) -> float:
    """The sum that words stand for.

    Args:
        words: of all ranks, added.
        bound: that they were made with.
        squared: as they were made.

    Returns:
        The nearest float.
    """
    high, low = words
    return math.ldexp(float((high << WIDTH) + low), (2 if squared else 1) * exponent(bound) - 2 * WIDTH)


def exponent(bound: float) -> int:
    """k such that |x| <= bound is less than 2^k; 0 for a bound of 0."""
    return math.frexp(bound)[1]
