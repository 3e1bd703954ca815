"""silu(g) u from operators whose bits do not depend on an element's place: exp, a quotient, sums and products.

    s = 1 / (1 + exp(-g)),   y = g s u,   dg = dy u s (1 + g (1 - s)),   du = dy g s

torch's own silu and sigmoid compute what is left of a vector at the end of a tensor by another function.
"""

import torch

from drumline.numerics.exact.pieces import wide


class SwiGLU(torch.autograd.Function):
    """Of gate and up, of one shape, in their dtype."""

    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        broad = gate.to(wide(gate.dtype))
        return (broad * _sigmoid(broad)).mul_(up).to(gate.dtype)

    @staticmethod
    def backward(ctx, *grad_outputs):
        gate, up = ctx.saved_tensors
        broad = gate.to(wide(gate.dtype))
        grad = grad_outputs[0].contiguous().to(broad.dtype)
        sigmoid = _sigmoid(broad)
        silu = broad * sigmoid
        grad_up = grad * silu
        slope = broad.sub(silu).add_(1.0).mul_(sigmoid)
        return grad.mul(up).mul_(slope).to(gate.dtype), grad_up.to(up.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return SwiGLU.apply(gate, up)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.div(1.0, x.neg().exp_().add_(1.0))
