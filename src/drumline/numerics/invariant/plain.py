"""The same operators in plain torch, for any device and dtype: slow, and invariant too.

They are made of elementwise additions and products alone, which IEEE 754 rounds in one way whatever surrounds an
element, and of exp, log and sqrt, which torch rounds alike in vectors and alone (probed). Sums are a binary tree
over positions; a product's sum ascends over k. Their bits differ from the kernels': a run uses one or the other.
"""

import torch
from torch import Tensor

_TILE = 64  # keys that are summed together


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


def matmul(a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """The product in fp32 at least, k ascending; each product and each addition is rounded by itself.

    Args:
        a: [..., M, K], any float dtype.
        b: [..., K, N], of the same dtype.
        start: what the sum begins with, in the result's dtype; None: zero.

    Returns:
        [..., M, N].
    """
    a, b = wide(a), wide(b)
    if start is None:
        out = a.new_zeros((*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
    else:
        out = start.clone()
    for k in range(a.shape[-1]):
        out += a[..., k, None] * b[..., k, None, :]
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


def attention(q_BTHK, k_BSGK, v_BSGK, cos_SK2, sin_SK2, starts_BS) -> tuple[Tensor, Tensor]:
    """Causal attention of the last T tokens: the result, and the logsumexp [B, H, T] of scaled scores."""
    _, _, v, score = _scores(q_BTHK, k_BSGK, v_BSGK, cos_SK2, sin_SK2, starts_BS)
    top = score.amax(-1, keepdim=True)
    weight = (score - top).exp()
    missing = -weight.shape[-1] % _TILE
    tiles = torch.nn.functional.pad(weight, (0, missing)).unflatten(-1, (-1, _TILE))
    total = top.new_zeros(top.shape[:-1])
    for part in tree_sum(tiles).unbind(-1):
        total += part
    out_BHTK = matmul(weight, v) / total[..., None]
    return out_BHTK.transpose(1, 2).to(q_BTHK.dtype), top[..., 0] + total.log()


def attention_backward(
    grad_BSHK, q_BSHK, k_BSGK, v_BSGK, cos_SK2, sin_SK2, starts_BS, out_BSHK, logsumexp_BHS
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, for queries of all S tokens."""
    q, k, v, score = _scores(q_BSHK, k_BSGK, v_BSGK, cos_SK2, sin_SK2, starts_BS)
    weight = (score - logsumexp_BHS[..., None]).exp()
    grad, out = wide(grad_BSHK).transpose(1, 2), wide(out_BSHK).transpose(1, 2)
    d_score = weight * (matmul(grad, v.transpose(-1, -2)) - tree_sum(grad * out)[..., None])
    grad_q, grad_k = matmul(d_score, k), matmul(d_score.transpose(-1, -2), q)
    grad_v = matmul(weight.transpose(-1, -2), grad)
    num_kv = k_BSGK.shape[2]

    def of_group(x_BHSK: Tensor) -> Tensor:
        heads = x_BHSK.unflatten(1, (num_kv, -1)).unbind(2)
        total = heads[0]
        for head in heads[1:]:
            total = total + head
        return total

    grad_q = _rotated(grad_q, cos_SK2, -sin_SK2) / q_BSHK.shape[-1] ** 0.5
    grad_k = _rotated(of_group(grad_k), cos_SK2, -sin_SK2)
    grads = zip((grad_q, grad_k, of_group(grad_v)), (q_BSHK, k_BSGK, v_BSGK), strict=True)
    dq, dk, dv = (g.transpose(1, 2).to(x.dtype) for g, x in grads)
    return dq, dk, dv


def _scores(q_BTHK, k_BSGK, v_BSGK, cos_SK2, sin_SK2, starts_BS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotated scaled queries, rotated keys, values, all [B, H, ., K] in fp32 at least; masked scores [B, H, T, S]."""
    num_queries, num_tokens = q_BTHK.shape[1], k_BSGK.shape[1]
    group = q_BTHK.shape[2] // k_BSGK.shape[2]
    first = num_tokens - num_queries
    cos, sin = (wide(x.to(wide(q_BTHK).dtype)) for x in (cos_SK2, sin_SK2))
    q = _rotated(wide(q_BTHK).transpose(1, 2), cos[first:], sin[first:]) / q_BTHK.shape[-1] ** 0.5
    k = _rotated(wide(k_BSGK).transpose(1, 2), cos, sin).repeat_interleave(group, 1)
    v = wide(v_BSGK).transpose(1, 2).repeat_interleave(group, 1)
    position = torch.arange(num_tokens, device=q.device)
    is_seen = (position <= position[first:, None])[None]
    if starts_BS is not None:
        is_seen = is_seen & (position >= starts_BS[:, first:, None])
    return q, k, v, matmul(q, k.transpose(-1, -2)).masked_fill(~is_seen[:, None], -torch.inf)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    u, w = x.chunk(2, dim=-1)
    return torch.cat((u * cos - w * sin, w * cos + u * sin), dim=-1)
