"""RMSNorm, in fp32 at least whatever the input's dtype.

    r = 1 / sqrt(mean(x^2) + eps),   y = w * x * r
    dw = sum over rows of dy * x * r,   dx = r * w * dy - x * r^3 * mean(dy * w * x)

The weight is rounded to x's dtype first, as sharding does that gathers weights in it: so both compute the same.
Source: Zhang and Sennrich 2019, arXiv:1910.07467; the gradients follow by the chain rule.

R rows (all dims but the last), D width.
"""

import torch
import torch.nn.functional as F
from torch import nn

from drumline.numerics import kernels


class RMSNorm(nn.Module):
    """The norm with its weight."""

    def __init__(self, dim: int, eps: float, device: torch.device | str = "meta"):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalizes the last dim.

    Args:
        x: [..., D], any float dtype.
        weight_D: any float dtype.
        eps: added to the mean square.

    Returns:
        As x, in its dtype.
    """
    if kernels.take(x, weight_D):
        return kernels.rms_norm(x, weight_D, eps)
    weight_D = weight_D.to(x.dtype)
    if x.is_cuda:
        return F.rms_norm(x, (x.shape[-1],), weight_D, eps)  # one fused kernel there; many passes on a CPU
    if torch.compiler.is_compiling():
        wide = x.to(_wide(x.dtype))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight_D).to(x.dtype)
    return _RMSNorm.apply(x, weight_D, eps)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number a row, and goes over the rows fewer times than the derivative of each operator would."""

    @staticmethod
    def forward(ctx, x, weight_D, eps):
        wide_RD = x.reshape(-1, x.shape[-1]).to(_wide(x.dtype))
        r_R1 = torch.linalg.vector_norm(wide_RD, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, r_R1)
        return (wide_RD * r_R1).mul_(weight_D).to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx, *grad_outputs):
        x, weight_D, r_R1 = ctx.saved_tensors
        wide_RD = x.reshape(-1, x.shape[-1]).to(r_R1.dtype)
        grad_RD = grad_outputs[0].reshape(wide_RD.shape).to(r_R1.dtype)
        wide_weight_D = weight_D.to(r_R1.dtype)
        product_RD = grad_RD * wide_RD
        grad_weight_D = product_RD.t().mv(r_R1[:, 0])
        shrink_R1 = product_RD.mv(wide_weight_D)[:, None].mul_(r_R1.pow(3)).div_(-x.shape[-1])
        grad_x_RD = torch.mul(grad_RD, wide_weight_D, out=product_RD).mul_(r_R1).addcmul_(wide_RD, shrink_R1)
        return grad_x_RD.to(x.dtype).view(x.shape), grad_weight_D.to(weight_D.dtype), None
