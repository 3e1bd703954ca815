"""silu(g) u from operators whose bits do not depend on an element's place: exp, a quotient, sums and products.

    s = 1 / (1 + exp(-g)),   y = g s u,   dg = dy u s (1 + g (1 - s)),   du = dy g s

torch's own silu and sigmoid compute what is left of a vector at the end of a tensor by another function. Where
drumline's kernel runs, it is one pass over memory.
"""

import torch

from drumline.numerics.exact.pieces import wide
from drumline.numerics.invariant.native import library
from drumline.numerics.kernels import layers


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, in their dtype, differentiable."""
    return _SwiGLU.apply(gate, up)


def swiglu_value(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The same of contiguous tensors, without derivative."""
    built = library(layers, gate, up)
    if built is not None:
        return layers.run_swiglu(built, gate, up)
    broad = gate.to(wide(gate.dtype))
    return (broad * sigmoid(broad)).mul_(up).to(gate.dtype)


def swiglu_gradients(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Derivatives of `swiglu_value`: of gate and of up, in their dtype."""
    built = library(layers, grad, gate, up)
    if built is not None and grad.dtype == gate.dtype:
        return layers.run_swiglu_backward(built, grad, gate, up)
    broad = gate.to(wide(gate.dtype))
    grad = grad.to(broad.dtype)
    share = sigmoid(broad)
    silu = broad * share
    slope = broad.sub(silu).add_(1.0).mul_(share)
    return grad.mul(up).mul_(slope).to(gate.dtype), (grad * silu).to(up.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return torch.div(1.0, x.neg().exp_().add_(1.0))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return swiglu_value(gate, up)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return swiglu_gradients(grad_outputs[0].contiguous(), *ctx.saved_tensors)


class Sigmoid(torch.autograd.Function):
    """`sigmoid`, differentiable."""

    @staticmethod
    def forward(ctx, x):
        found = sigmoid(x)
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx, *grad_outputs):
        (found,) = ctx.saved_tensors
        return grad_outputs[0] * found * (1.0 - found)
