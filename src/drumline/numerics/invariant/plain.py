"""The same operators in plain torch, for any device and dtype: slow, and invariant too.

They are made of elementwise additions and products alone, which IEEE 754 rounds in one way whatever surrounds an
element, and of exp, log and sqrt, which torch rounds alike in vectors and alone (probed). Sums are a binary tree
over positions; a product's sum ascends over k. Their bits differ from the kernels': a run uses one or the other.
"""

import torch
from torch import Tensor

_FOLD = 16  # of a product's sum, per call


def wide(x: Tensor) -> Tensor:
    """x in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last dim, in fp32 at least: the upper half is added to the lower until one is left."""
    x = wide(x)
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    while (n := x.shape[-1]) > 1:
        half = (n + 1) // 2
        lower = x[..., :half].clone()
        lower[..., : n - half] += x[..., half:]
        x = lower
    return x[..., 0]


def softmax(x: Tensor, is_log: bool) -> Tensor:
    """Softmax or log-softmax over the last dim, in x's dtype."""
    shifted = wide(x) - wide(x).amax(-1, keepdim=True)
    exponentials = shifted.contiguous().exp()
    total = tree_sum(exponentials)[..., None]
    return (shifted - total.log() if is_log else exponentials / total).to(x.dtype)


def softmax_backward(grad: Tensor, y: Tensor, is_log: bool) -> Tensor:
    """The gradient of the input, from that of the result y and y itself."""
    dy, p = wide(grad), wide(y).contiguous()
    if is_log:
        return (dy - p.exp() * tree_sum(dy)[..., None]).to(y.dtype)
    return (p * (dy - tree_sum(dy * p)[..., None])).to(y.dtype)


def embedding_backward(grad: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    """The gradient [num_rows, D] of an embedding, in fp32 at least: occurrences of a token are added in order."""
    out = wide(grad).new_zeros((num_rows, grad.shape[-1]))
    if not tokens.numel():
        return out
    order = tokens.argsort(stable=True)
    ranked = tokens[order]
    # The n-th occurrences of all tokens, for n = 0, 1, ...: no row is met twice in one addition.
    place = torch.arange(len(ranked), device=ranked.device)
    is_first = torch.ones_like(ranked, dtype=torch.bool)
    is_first[1:] = ranked[1:] != ranked[:-1]
    occurrence = place - torch.where(is_first, place, 0).cummax(0).values
    for n in range(int(occurrence.max()) + 1):
        chosen = occurrence == n
        out[ranked[chosen]] += wide(grad[order[chosen]])
    return out


def matmul(a_MK: Tensor, b_KN: Tensor, start_MN: Tensor | None = None) -> Tensor:
    """The product in fp32 at least, k ascending; each product and each addition is rounded by itself.

    Args:
        a_MK: any float dtype.
        b_KN: of the same dtype.
        start_MN: what the sum begins with, in the result's dtype; None: zero.

    Returns:
        [M, N].
    """
    a, b = wide(a_MK), wide(b_KN)
    out = a.new_zeros((a.shape[0], b.shape[1])) if start_MN is None else start_MN.clone()
    for k in range(0, a.shape[1], _FOLD):
        products = a[:, k : k + _FOLD].t()[:, :, None] * b[k : k + _FOLD][:, None, :]
        for product in products:
            out += product
    return out


def rms_norm(x_RD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of rows, and the factor of each row."""
    x = wide(x_RD)
    scale_R = 1 / (tree_sum(x * x) / x.shape[-1] + eps).sqrt()
    return (x * scale_R[:, None] * weight_D).to(x_RD.dtype), scale_R


def rms_norm_backward(grad_RD: Tensor, x_RD: Tensor, weight_D: Tensor, scale_R: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and, in fp32 at least, of the weight."""
    dy, x, scale_R1 = wide(grad_RD), wide(x_RD), scale_R[:, None]
    weighted = dy * weight_D
    shift_R1 = tree_sum(weighted * x)[:, None] / x.shape[-1] * (scale_R1 * scale_R1)
    grad_x = scale_R1 * (weighted - x * shift_R1)
    return grad_x.to(x_RD.dtype), tree_sum((dy * (x * scale_R1)).t())


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) from operators that round alike everywhere; torch's own does not."""
    return 1 / (1 + (-x).contiguous().exp())


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    g = wide(gate)
    return (g * sigmoid(g) * wide(up)).to(gate.dtype)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    d, g, u = wide(grad), wide(gate), wide(up)
    s = sigmoid(g)
    return (d * u * (s * (1 + g * (1 - s)))).to(gate.dtype), (d * (g * s)).to(up.dtype)
