"""A step of AdamW on CPU in one pass over memory, with bits that do not depend on how tensors are cut.

torch's fused step computes what is left of a vector at the end of a tensor otherwise than the rest, and its operators
one after the other read and write every tensor several times. The C++ is in adamw.cpp.
"""

import ctypes
import functools
import math

import torch
from torch import Tensor

from drumline.numerics.kernels.build import KernelError, load


class _Call(ctypes.Structure):
    """The C++ struct AdamW, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("param", "grad", "first", "second")),
        *((name, ctypes.c_int64) for name in ("count", "threads")),
        *((name, ctypes.c_float) for name in ("decay", "take1", "keep2", "take2", "rate", "root2", "eps")),
    )


def adamw_(
    library: ctypes.CDLL,
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Moves a parameter and its moments, in place.

    Args:
        library: from `library()`.
        param: fp32, dense.
        grad: of the same shape and strides, as are the moments.
        first: mean of gradients.
        second: mean of their squares.
        step: the number of this step, from 1.
        lr: learning rate.
        betas: decays of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
    """
    call = _Call(count=param.numel(), threads=torch.get_num_threads())
    call.param, call.grad, call.first, call.second = (x.data_ptr() for x in (param, grad, first, second))
    call.decay, call.eps = 1.0 - lr * weight_decay, eps
    call.take1, call.keep2, call.take2 = 1.0 - betas[0], betas[1], 1.0 - betas[1]
    call.rate, call.root2 = lr / (1.0 - betas[0] ** step), math.sqrt(1.0 - betas[1] ** step)
    library.drumline_adamw(ctypes.byref(call))


@functools.cache
def library() -> ctypes.CDLL:
    """The built library; raises KernelError where it cannot be had."""
    return load("adamw", check=_check)


def _check(library: ctypes.CDLL) -> None:
    """Compare a fresh build with the definition in fp64, so that a miscompiled kernel is never used."""
    generator = torch.Generator().manual_seed(0)
    w, g, m, v = (torch.randn(1003, generator=generator) for _ in range(4))
    v.square_()
    grad, first = g.double(), m.double().lerp(g.double(), 0.1)
    second = 0.95 * v.double() + 0.05 * grad.square()
    moved = first / (1 - 0.9**3) / ((second / (1 - 0.95**3)).sqrt() + 1e-8)
    want = (1 - 0.01 * 0.1) * w.double() - 0.01 * moved
    adamw_(library, w, g, m, v, 3, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for name, got, wanted in (("parameter", w, want), ("first moment", m, first), ("second moment", v, second)):
        error = ((got - wanted).abs().max() / wanted.abs().max()).item()
        if not error < 1e-6:
            raise KernelError(f"the built kernel of AdamW is wrong here: {name} differs from fp64 by {error:.1e}")
