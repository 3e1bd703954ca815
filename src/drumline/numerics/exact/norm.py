"""RMSNorm of chunks: rows of one chunk in one call, and the weight's gradient a leaf a chunk.

    r = 1 / sqrt(mean(x^2) + eps),   y = w * x * r
    dw = sum over rows of dy * x * r,   dx = r * w * dy - x * r^3 * mean(dy * w * x)

The root and the quotient are taken apart, since rsqrt's bits depend on an element's place in a vector. Where drumline's
kernel runs, which adds each row alike, rows take one pass over memory.

C chunks, R rows of a chunk, D width.
"""

import torch

from drumline.numerics.exact.pieces import wide
from drumline.numerics.invariant.native import library
from drumline.numerics.kernels import layers


def rms_norm(x_CRD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalizes rows.

    Args:
        x_CRD: contiguous.
        weight_D: in x's dtype.
        eps: added to the mean square.

    Returns:
        y_CRD in x's dtype, and 1 / root of each row, r_CR1, in fp32 at least.
    """
    built = library(layers, x_CRD)
    if built is not None:
        y_CRD, r_CR = layers.run_norm(built, x_CRD, weight_D, eps)
        return y_CRD, r_CR[..., None]
    wide_CRD = x_CRD.to(wide(x_CRD.dtype))
    mean_CR1 = torch.stack([x_RD.square().sum(-1, keepdim=True) for x_RD in wide_CRD]).div_(x_CRD.shape[-1])
    r_CR1 = torch.div(1.0, mean_CR1.add_(eps).sqrt_())
    return (wide_CRD * r_CR1).mul_(weight_D).to(x_CRD.dtype), r_CR1


def rms_norm_gradients(
    grad_CRD: torch.Tensor, x_CRD: torch.Tensor, weight_D: torch.Tensor, r_CR1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Derivatives of `rms_norm`.

    Args:
        grad_CRD: of y, contiguous.
        x_CRD: as in the forward.
        weight_D: likewise.
        r_CR1: that the forward gave.

    Returns:
        The gradient of x in its dtype, and of the weight a leaf a chunk, [C, D] in fp32 at least.
    """
    weight_D = weight_D.to(r_CR1.dtype)
    built = library(layers, grad_CRD, x_CRD)
    if built is not None and grad_CRD.dtype == x_CRD.dtype:
        chunks = zip(grad_CRD, x_CRD, r_CR1.squeeze(-1), strict=True)
        found = [layers.run_norm_backward(built, grad, x, weight_D, r) for grad, x, r in chunks]
        return torch.stack([grad for grad, _ in found]), torch.stack([leaf for _, leaf in found])
    leaves, grads = [], torch.empty_like(x_CRD)
    for grad_RD, x_RD, r_R1, result_RD in zip(grad_CRD, x_CRD, r_CR1, grads, strict=True):
        x_RD = x_RD.to(r_R1.dtype) * r_R1
        grad_RD = grad_RD.to(r_R1.dtype)
        leaves.append((grad_RD * x_RD).sum(0))
        grad_RD = grad_RD * weight_D
        shrink_R1 = (grad_RD * x_RD).sum(-1, keepdim=True).div_(x_RD.shape[-1])
        result_RD.copy_(grad_RD.sub_(x_RD.mul_(shrink_R1)).mul_(r_R1))
    return grads, torch.stack(leaves)
