"""Causal attention whose bits do not depend on batch, heads beside, later tokens, chunks of queries or threads.

    out_i = sum_j softmax_j(rope(q_i) . rope(k_j) / sqrt(K)) v_j over starts_i <= j <= i
Keys are taken in tiles of 64 at absolute positions of the row. So a query has the same bits in a full pass, in a chunk
against a cache of what came before, and alone: decoding gives what training computed. The cache holds keys as they are
before their rotation.

B sequences, S tokens, T <= S of them with queries, H query heads, G key/value heads, K head width, 2 = K / 2
frequencies.
"""

import torch
from torch import Tensor

from drumline.numerics.invariant import plain
from drumline.numerics.invariant.native import as_wide, gpu, library, like, operator
from drumline.numerics.kernels import causal_attention as native


def attention(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, cos_SK2: Tensor, sin_SK2: Tensor, starts_BS: Tensor | None = None
) -> Tensor:
    """Attends, rotating queries and keys on the way.

    Args:
        q_BTHK: queries of the last T tokens, before rotation; T = S: the whole row, T = 1: one token decoded.
        k_BSGK: keys of all S tokens before rotation; G divides H.
        v_BSGK: values.
        cos_SK2: cosines of position times frequency, fp32 at least, rotate-half convention (Hugging Face's Llama).
        sin_SK2: sines.
        starts_BS: int32, the first token of each token's document within its row; None: one document a row.

    Returns:
        out_BTHK in q's dtype, differentiable in q, k and v.

    Raises:
        ValueError: shapes do not fit.
    """
    (B, T, H, K), (S, G) = q_BTHK.shape, k_BSGK.shape[1:3]
    if T > S or k_BSGK.shape != (B, S, G, K) or v_BSGK.shape != k_BSGK.shape or G == 0 or H % G:
        raise ValueError(
            f"attention: q {tuple(q_BTHK.shape)} = [B, T, H, K] does not go with k {tuple(k_BSGK.shape)} and v "
            f"{tuple(v_BSGK.shape)} = [B, S, G, K]: T <= S and G divides H"
        )
    if K % 2 or cos_SK2.shape != (S, K // 2) or sin_SK2.shape != cos_SK2.shape:
        raise ValueError(
            f"attention: cos {tuple(cos_SK2.shape)} and sin {tuple(sin_SK2.shape)} must be ({S}, K / 2) for K = {K}: "
            "one row for every token that has a key"
        )
    return _Attention.apply(q_BTHK, k_BSGK, v_BSGK, cos_SK2, sin_SK2, starts_BS)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        out, logsumexp = _forward(*inputs)
        ctx.save_for_backward(*inputs, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx, *grad_outputs):
        q, k, v, cos, sin, starts, out, logsumexp = ctx.saved_tensors
        num_before = k.shape[1] - q.shape[1]
        rows = [grad_outputs[0], q, out]
        if num_before:  # tokens without a query have one whose weights and gradient are zero
            rows = [torch.cat((x.new_zeros((len(x), num_before, *x.shape[2:])), x), 1) for x in rows]
            beyond = torch.full((*logsumexp.shape[:2], num_before), 1e30, dtype=logsumexp.dtype, device=q.device)
            logsumexp = torch.cat((beyond, logsumexp), 2)
        grad, q, out = rows
        grad_q, grad_k, grad_v = _backward(grad, q, k, v, cos, sin, starts, out, logsumexp)
        return grad_q[:, num_before:], grad_k, grad_v, None, None, None


def _run(q, k, v, cos, sin, starts):
    if kernels := gpu("attention", q, k, v):
        return kernels.forward(q, k, v, cos, sin, starts)
    built = library(native, q, k, v)
    if built is not None:
        return native.forward(built, q, k, v, cos.float(), sin.float(), starts)
    out, logsumexp = plain.attention(q, k, v, cos, sin, starts)
    return out.contiguous(), logsumexp.contiguous()


def _run_backward(grad, q, k, v, cos, sin, starts, out, logsumexp):
    if kernels := gpu("attention_backward", q, k, v):
        return kernels.backward(grad, q, k, v, cos, sin, starts, out, logsumexp)
    built = library(native, q, k, v)
    if built is not None:
        return native.backward(built, grad, q, k, v, cos.float(), sin.float(), starts, out, logsumexp)
    grads = plain.attention_backward(grad, q, k, v, cos, sin, starts, out, logsumexp)
    return tuple(x.contiguous() for x in grads)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? starts"
_forward = operator(
    f"invariant_attention({_INPUTS}) -> (Tensor, Tensor)",
    _run,
    lambda q, *_: (like(q), as_wide(q, (q.shape[0], q.shape[2], q.shape[1]))),
)
_backward = operator(
    f"invariant_attention_backward(Tensor grad, {_INPUTS}, Tensor out, Tensor logsumexp) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    lambda _, q, k, v, *__: (like(q), like(k), like(v)),
)
