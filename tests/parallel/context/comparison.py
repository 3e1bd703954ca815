"""Attention across ranks against the definition in fp64 on one device, as ratios of errors.

error(ranks, fp64) / error(one device, fp64): 1 where spreading adds no error of its own.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from drumline.models import Rope
from drumline.models.attention import SdpaAttend
from drumline.parallel.context import ContextGroups, ContextSplit, context_attend, context_groups, unshard
from drumline.parallel.mesh import Mesh
from drumline.recipe.layout import Layout

NAMES = ("out", "grad_q", "grad_k", "grad_v")


@dataclass(frozen=True)
class Case:
    method: str
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    tokens: int = 96
    ulysses: int = 1
    dtype: torch.dtype = torch.float32
    documents: bool = False


def starts_of(tokens):
    """Two rows: documents that are long, of one token, and across chunks; and documents of seven tokens."""
    edges = [0, tokens // 8 - 1, tokens // 8, tokens // 2 + 3, tokens - 1]
    first = torch.tensor([max(e for e in edges if e <= t) for t in range(tokens)])
    return torch.stack([first, torch.arange(tokens) // 7 * 7]).int()


def inputs(case):
    generator = torch.Generator().manual_seed(0)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, grad = (
        torch.randn(2, case.tokens, n, case.width, generator=generator).to(case.dtype).double() for n in heads
    )
    angle = torch.outer(torch.arange(case.tokens).float(), 100.0 ** -torch.arange(0, 1, 2 / case.width))
    return q, k, v, grad, Rope(angle.cos(), angle.sin()), starts_of(case.tokens) if case.documents else None


def definition(q, k, v, rope, starts):
    """softmax(q k / sqrt(K)) v with a dense mask; the rotation as a product of complex numbers."""
    turn = torch.complex(rope.cos_TK2.double(), rope.sin_TK2.double())[:, None]

    def turned(x):
        z = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((z.real, z.imag), -1)

    group = q.shape[2] // k.shape[2]
    keys, values = turned(k).repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihk,bjhk->bhij", turned(q), keys) / math.sqrt(q.shape[-1])
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(q.shape[1])
    seen = (j <= i).expand(q.shape[0], -1, -1)
    if starts is not None:
        seen = seen & (j >= starts[:, :, None])
    return torch.einsum("bhij,bjhk->bihk", scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1), values)


def with_gradients(attend, grad, *leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attend(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def groups_of(degree, ulysses) -> ContextGroups:
    return context_groups(Mesh(Layout(cp=degree), None, dist.get_rank()), ulysses)


def across_ranks(case, groups):
    """Output and gradients of the whole sequence, computed by all ranks."""
    q, k, v, grad, rope, starts = inputs(case)
    split: ContextSplit = groups.split
    attend = context_attend(case.method, groups, SdpaAttend())
    prepare = getattr(attend, "prepare", None)
    mask = None if starts is None else split.shard(starts)
    if mask is not None and prepare is not None:
        mask = prepare(mask, case.dtype)
    mine = [split.shard(x).to(case.dtype) for x in (q, k, v)]
    parts = with_gradients(lambda *x: attend(*x, rope, mask), split.shard(grad).to(case.dtype), *mine)
    whole = []
    for part in parts:
        gathered = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(split.degree)]
        dist.all_gather(gathered, part.contiguous())
        whole.append(unshard(gathered))
    return whole


def on_one_device(case):
    q, k, v, grad, rope, starts = inputs(case)
    attend = SdpaAttend()
    mask = None if starts is None else attend.prepare(starts, case.dtype)
    return with_gradients(
        lambda *x: attend(*x, rope, mask), grad.to(case.dtype), *(x.to(case.dtype) for x in (q, k, v))
    )


def in_fp64(case):
    q, k, v, grad, rope, starts = inputs(case)
    return with_gradients(lambda *x: definition(*x, rope, starts), grad, q, k, v)


def error_ratios(case, groups=None):
    """By name, how much further from fp64 the ranks are than one device; nan where a value is not finite."""
    groups = groups_of(dist.get_world_size(), case.ulysses) if groups is None else groups
    results = zip(NAMES, across_ranks(case, groups), on_one_device(case), in_fp64(case), strict=True)
    return {name: float((ranks - exact).norm() / (one - exact).norm()) for name, ranks, one, exact in results}
