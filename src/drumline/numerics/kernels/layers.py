"""RMSNorm and SwiGLU on CPU: each forward and each backward is one pass over memory.

    RMSNorm:  y = w x / sqrt(mean(x^2) + eps)          SwiGLU:  y = silu(gate) up
torch computes either as a chain of operators that each read and write a whole tensor. Inputs and outputs are fp32
or bf16, arithmetic is fp32, and bits depend on neither threads nor tails. The C++ is in layers.cpp.
"""

import ctypes
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from drumline.numerics.kernels.build import KernelError, load
from drumline.numerics.kernels.operators import define, mode, pointers, rows_and_width


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim; the weight is rounded to x's dtype first.

    Args:
        x: [..., D], fp32 or bf16.
        weight: [D].
        eps: added to the mean of squares.

    Returns:
        [..., D] in x's dtype, differentiable in x and weight.
    """
    return _RmsNorm.apply(x, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate: fp32 or bf16.
        up: of the same shape and dtype.

    Returns:
        Their combination in the same dtype, differentiable in both.
    """
    return _Swiglu.apply(gate, up)


def norm_function(norm: Callable, norm_backward: Callable) -> type[torch.autograd.Function]:
    """RMSNorm of (x, weight, eps), given what computes it and the scales, and what computes both gradients."""

    class RmsNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            y, scale = norm(x, weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return y

        @staticmethod
        def backward(ctx, *grad_outputs):
            return *norm_backward(grad_outputs[0], *ctx.saved_tensors), None

    return RmsNorm


def swiglu_function(swiglu: Callable, swiglu_backward: Callable) -> type[torch.autograd.Function]:
    """SwiGLU of (gate, up), given what computes it and what computes both gradients."""

    class Swiglu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return swiglu(gate, up)

        @staticmethod
        def backward(ctx, *grad_outputs):
            return swiglu_backward(grad_outputs[0], *ctx.saved_tensors)

    return Swiglu


def run_norm(library: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, weight = x.contiguous(), _rounded(weight, x.dtype)
    y, scale = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32)
    library.drumline_norm_forward(*pointers(x, weight, y, scale), *rows_and_width(x), ctypes.c_float(eps), *mode(x))
    return y, scale


def run_norm_backward(
    library: ctypes.CDLL, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    grad, x, wide = grad.contiguous(), x.contiguous(), _rounded(weight, x.dtype)
    grad_x, grad_weight = torch.empty_like(x), torch.empty(weight.shape, dtype=torch.float32)
    sizes = rows_and_width(x)
    partials = torch.empty(library.drumline_norm_partials(*sizes), dtype=torch.float32)
    library.drumline_norm_backward(*pointers(grad, x, wide, scale, grad_x, grad_weight, partials), *sizes, *mode(x))
    return grad_x, grad_weight.to(weight.dtype)


def run_swiglu(library: ctypes.CDLL, gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    library.drumline_swiglu_forward(*pointers(gate, up, y), ctypes.c_int64(y.numel()), *mode(gate))
    return y


def run_swiglu_backward(library: ctypes.CDLL, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    library.drumline_swiglu_backward(
        *pointers(grad, gate, up, grad_gate, grad_up), ctypes.c_int64(gate.numel()), *mode(gate)
    )
    return grad_gate, grad_up


def _rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight if weight.dtype == dtype == torch.float32 else weight.to(dtype).float()


@functools.cache
def library() -> ctypes.CDLL:
    """The built library; raises KernelError where it cannot be had."""
    library = load("layers", check=_check)
    library.drumline_norm_partials.restype = ctypes.c_int64
    return library


def _check(library: ctypes.CDLL) -> None:
    """Compare a fresh build with torch in fp64, so that a miscompiled kernel is never used."""
    generator = torch.Generator().manual_seed(0)
    x, y, grad = (torch.randn((70, 45), generator=generator) for _ in range(3))
    weight = torch.randn(45, generator=generator)
    own: list[Tensor] = []
    out, scale = run_norm(library, x, weight, 1e-5)
    own += [out, *run_norm_backward(library, grad, x, weight, scale)]
    own += [run_swiglu(library, x, y), *run_swiglu_backward(library, grad, x, y)]
    with torch.enable_grad():
        x64, y64, weight64 = (t.double().requires_grad_() for t in (x, y, weight))
        normed, gated = F.rms_norm(x64, (45,), weight64, 1e-5), F.silu(x64) * y64
        wanted = [normed, *torch.autograd.grad(normed, (x64, weight64), grad.double())]
        wanted += [gated, *torch.autograd.grad(gated, (x64, y64), grad.double())]
    for name, got, want in zip(("norm", "norm dx", "norm dw", "swiglu", "dgate", "dup"), own, wanted, strict=True):
        error = ((got - want).abs().max() / want.abs().max()).item()
        if not error < 1e-5:
            raise KernelError(f"the built kernels of layers are wrong here: {name} differs from fp64 by {error:.1e}")


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_norm = define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda *inputs: run_norm(library(), *inputs),
    lambda x, weight, eps: (_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)),
)
_norm_backward = define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
    lambda *inputs: run_norm_backward(library(), *inputs),
    lambda grad, x, weight, scale: (_like(x), torch.empty_like(weight)),
)
_swiglu = define(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    lambda *inputs: run_swiglu(library(), *inputs),
    lambda gate, up: _like(gate),
)
_swiglu_backward = define(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    lambda *inputs: run_swiglu_backward(library(), *inputs),
    lambda grad, gate, up: (_like(gate), _like(up)),
)
_RmsNorm = norm_function(_norm, _norm_backward)
_Swiglu = swiglu_function(_swiglu, _swiglu_backward)
