"""All-gather attention: every rank gathers all keys and values, and computes its own queries against them.

One collective instead of n - 1 steps, at the price of holding all keys and values of one layer for as long as that
layer computes. They are gathered again in the backward rather than kept, and their gradients reduce-scattered.
Source: Llama 3, arXiv:2407.21783, section 3.3.2.

B sequences, T tokens of this rank, H query heads, G key/value heads, K head width, 2 = keys and values.
"""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from drumline.parallel.context.block import (
    Block,
    attend_block,
    attend_block_backward,
    nothing_seen,
    pack,
    zeros_wide,
)
from drumline.parallel.context.shared import SharedAttend
from drumline.parallel.context.split import ContextSplit


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BTHK, k_BTGK, v_BTGK, split, group, documents):
        q, kv = q_BTHK.transpose(1, 2), pack(k_BTGK, v_BTGK)
        ctx.split, ctx.group = split, group
        ctx.block = Block(split, range(2 * split.degree), documents)
        result = nothing_seen(q)
        attend_block(q, gather_chunks(kv, split, group), ctx.block, result)
        out = result.out_BHTK.to(q.dtype)
        ctx.save_for_backward(q, kv, out, result.lse_BHT)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, kv, out, lse = ctx.saved_tensors
        whole_kv = gather_chunks(kv, ctx.split, ctx.group)
        grad_q, grad_kv = zeros_wide(q), zeros_wide(whole_kv)
        grad_out = grad_outputs[0].transpose(1, 2)
        attend_block_backward(grad_out, q, whole_kv, out, lse, ctx.block, grad_q, grad_kv)
        grad_k, grad_v = scatter_sum(grad_kv, ctx.split, ctx.group).to(kv.dtype).transpose(2, 3)
        return grad_q.to(q.dtype).transpose(1, 2), grad_k, grad_v, None, None, None


def gather_chunks(kv_2BGTK: torch.Tensor, split: ContextSplit, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All ranks' keys and values in the order of their positions, [2, B, G, degree x T, K]."""
    if split.degree == 1:
        return kv_2BGTK
    parts = [torch.empty_like(kv_2BGTK) for _ in range(split.degree)]
    dist.all_gather(parts, kv_2BGTK, group=group)
    heads, tails = zip(*(part.tensor_split(2, dim=3) for part in parts), strict=True)
    return torch.cat([*heads, *reversed(tails)], dim=3)


def scatter_sum(whole_2BGSK: torch.Tensor, split: ContextSplit, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum over ranks of this rank's chunks."""
    if split.degree == 1:
        return whole_2BGSK
    chunks = whole_2BGSK.tensor_split(2 * split.degree, dim=3)
    parts = [torch.cat([chunks[c] for c in split.chunks_of(rank)], dim=3) for rank in range(split.degree)]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, group=group)
    return mine


class GatherAttend(SharedAttend):
    """Every rank gathers all keys and values."""

    across = _Gather
