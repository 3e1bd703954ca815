"""Ring attention: keys and values travel from rank to rank while each rank computes on those that it has.

At step i rank r holds the keys and values that began on rank r - i, and passes them on before it computes. In the
backward their gradients travel with them, one step behind, and take one more step home.
Each rank receives (n - 1) blocks forward; backward (n - 1) blocks and n blocks of gradients.
Source: Liu et al. 2023, arXiv:2310.01889.

B sequences, T tokens of this rank, H query heads, G key/value heads, K head width, 2 = keys and values.
"""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from drumline.comm import Passing
from drumline.parallel.context.block import (
    Block,
    attend_block,
    attend_block_backward,
    nothing_seen,
    pack,
    zeros_wide,
)
from drumline.parallel.context.documents import Documents
from drumline.parallel.context.shared import SharedAttend
from drumline.parallel.context.split import ContextSplit

_KV, _GRAD = 0, 1  # tags: both kinds of message can be under way between the same two ranks


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BTHK, k_BTGK, v_BTGK, split, group, documents):
        q, kv = q_BTHK.transpose(1, 2), pack(k_BTGK, v_BTGK)
        ctx.split, ctx.group, ctx.documents = split, group, documents
        result = nothing_seen(q)
        block_kv = kv
        for step in range(split.degree):
            passing = _passing(block_kv, split, group, _KV) if step < split.degree - 1 else None
            attend_block(q, block_kv, _block(split, step, documents), result)
            if passing is not None:
                block_kv = passing.wait()
        out = result.out_BHTK.to(q.dtype)
        ctx.save_for_backward(q, kv, out, result.lse_BHT)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, kv, out, lse = ctx.saved_tensors
        split, group = ctx.split, ctx.group
        grad_out = grad_outputs[0].transpose(1, 2)
        grad_q = zeros_wide(q)
        grad_passing = None
        for step in range(split.degree):
            passing = _passing(kv, split, group, _KV) if step < split.degree - 1 else None
            grad_kv = zeros_wide(kv)
            attend_block_backward(grad_out, q, kv, out, lse, _block(split, step, ctx.documents), grad_q, grad_kv)
            if grad_passing is not None:
                grad_kv += grad_passing.wait()
            grad_passing = _pass_gradient(grad_kv, split, group)
            if passing is not None:
                kv = passing.wait()
        assert grad_passing is not None
        grad_k, grad_v = grad_passing.wait().to(kv.dtype).transpose(2, 3)
        return grad_q.to(q.dtype).transpose(1, 2), grad_k, grad_v, None, None, None


def origin_of(rank: int, step: int, degree: int) -> int:
    """The rank on which the keys began that a rank holds at a step."""
    return (rank - step) % degree


def _block(split: ContextSplit, step: int, documents: Documents | None) -> Block:
    return Block(split, split.chunks_of(origin_of(split.rank, step, split.degree)), documents)


def _passing(sent: torch.Tensor, split: ContextSplit, group: dist.ProcessGroup | None, tag: int) -> Passing:
    return Passing(sent, split.degree, split.rank, group, tag=tag)


def _pass_gradient(grad_kv: torch.Tensor, split: ContextSplit, group: dist.ProcessGroup | None) -> Passing:
    return _passing(grad_kv, split, group, _GRAD)


class RingAttend(SharedAttend):
    """Keys and values are passed around a ring."""

    across = _Ring
