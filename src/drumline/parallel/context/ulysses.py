"""Ulysses: an all-to-all turns shards of tokens into shards of heads, and back after attention.

Between the two every rank has all tokens of the group for H / n of the heads, so any attention can compute them: the
single-device one, or a ring over another group whose blocks are then n times as long.
Where there are fewer key/value heads than ranks, each is sent to all ranks that hold one of its query heads.
The group's ranks are neighbours in the sequence's split: their chunks together are one head and one tail run.
Source: Jacobs et al. 2023, arXiv:2309.14509; with a ring: Fang and Zhao 2024, arXiv:2405.07719.

B sequences, T tokens of this rank, H query heads, G key/value heads, K head width.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from drumline.models import Attend
from drumline.models.rope import Rope
from drumline.parallel.context.split import unshard
from drumline.recipe.errors import DrumlineError
from drumline.recipe.layout import can_deal_heads


class UlyssesAttend:
    """An `Attend` that lets another one work on some heads of all the group's tokens.

    Args:
        inner: computes attention over the group's tokens.
        degree: n, the ranks of the group.
        group: neighbours in the sequence's split, in its order.
    """

    def __init__(self, inner: Attend, degree: int, group: dist.ProcessGroup | None):
        self._inner = inner
        self._degree = degree
        self._group = group

    def prepare(self, starts_BT: torch.Tensor, dtype: torch.dtype) -> Any:
        """What the inner attention makes of the whole group's document starts."""
        parts = [torch.empty_like(starts_BT) for _ in range(self._degree)]
        dist.all_gather(parts, starts_BT.contiguous(), group=self._group)
        gathered = unshard(parts)
        prepare = getattr(self._inner, "prepare", None)
        return gathered if prepare is None else prepare(gathered, dtype)

    def __call__(
        self, q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor, rope: Rope, mask: Any
    ) -> torch.Tensor:
        """As `Attend`, for this rank's tokens; rope holds the tables of the whole sequence."""
        reason = heads_problem(q_BTHK.shape[2], k_BTGK.shape[2], self._degree)
        if reason is not None:
            raise DrumlineError(reason)
        q, k, v = (_TokensToHeads.apply(x, self._degree, self._group) for x in (q_BTHK, k_BTGK, v_BTGK))
        return _HeadsToTokens.apply(  # pyright: ignore[reportReturnType]
            self._inner(q, k, v, rope, mask),  # pyright: ignore[reportArgumentType]
            self._degree,
            self._group,
        )


def heads_problem(num_heads: int, num_kv_heads: int, degree: int) -> str | None:
    """Why heads cannot be dealt to ranks; None: they can.

    Args:
        num_heads: H, of this rank.
        num_kv_heads: G, of this rank.
        degree: ranks of the group.

    Returns:
        A text with what is wrong and what would work.
    """
    fitting = [n for n in range(1, num_heads + 1) if can_deal_heads(num_heads, num_kv_heads, n)]
    if degree in fitting:
        return None
    return (
        f"Ulysses over {degree} ranks cannot deal out {num_heads} query heads and {num_kv_heads} key/value heads: the "
        f"ranks must divide the query heads, and divide or be a multiple of the key/value heads"
        f"\n  try: a degree of {', '.join(map(str, fitting))}, or ring attention, which takes any"
    )


class _TokensToHeads(torch.autograd.Function):
    """[B, T, G, K] -> [B, n T, max(1, G / n), K]; a head that several ranks need goes to all of them."""

    @staticmethod
    def forward(ctx, x_BTGK, degree, group):
        ctx.degree, ctx.group, ctx.copies = degree, group, max(1, degree // x_BTGK.shape[2])
        return _to_heads(_copied(x_BTGK, ctx.copies), degree, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = _to_tokens(grad_outputs[0], ctx.degree, ctx.group)
        if ctx.copies > 1:
            wide = torch.promote_types(grad.dtype, torch.float32)
            grad = grad.unflatten(2, (-1, ctx.copies)).sum(3, dtype=wide).to(grad.dtype)
        return grad, None, None


class _HeadsToTokens(torch.autograd.Function):
    """[B, n T, H / n, K] -> [B, T, H, K]."""

    @staticmethod
    def forward(ctx, x_BTHK, degree, group):
        ctx.degree, ctx.group = degree, group
        return _to_tokens(x_BTHK, degree, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _to_heads(grad_outputs[0], ctx.degree, ctx.group), None, None


def _copied(x_BTGK: torch.Tensor, copies: int) -> torch.Tensor:
    return x_BTGK.repeat_interleave(copies, dim=2) if copies > 1 else x_BTGK


def _to_heads(x_BTHK: torch.Tensor, degree: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    sent = torch.stack(x_BTHK.tensor_split(degree, dim=2))
    return unshard(_all_to_all(sent, group).unbind())


def _to_tokens(x_BTHK: torch.Tensor, degree: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    chunks = x_BTHK.tensor_split(2 * degree, dim=1)
    sent = torch.stack([torch.cat([chunks[r], chunks[2 * degree - 1 - r]], dim=1) for r in range(degree)])
    return torch.cat(_all_to_all(sent, group).unbind(), dim=2)


def _all_to_all(sent: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
