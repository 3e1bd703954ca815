"""Collectives over the ranks of a group, and their derivatives.

    forward          backward            used where
    gather           reduce-scatter      token shares enter matmuls, whose input gradients are partial sums
    reduce-scatter   gather              partial sums of matmuls become token shares
    copy             all-reduce          the same, where all ranks hold all tokens
    all-reduce       copy                likewise

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (f and g); Korthikanti et al. 2022, arXiv:2205.05198, section
4.2.2 (g and its mirror).

T tokens, S tokens of a rank's share; they are the last dim but one.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

_ops = torch.ops._c10d_functional  # under these names in every torch since 2.1, and seen by tracing


@dataclass(frozen=True)
class Ranks:
    """The ranks that share out the matmuls.

    Attributes:
        group: theirs.
        degree: how many they are.
        rank: this one's number among them.
    """

    group: dist.ProcessGroup
    degree: int
    rank: int


def start_gather(x: torch.Tensor, ranks: Ranks) -> Callable[[], torch.Tensor]:
    """Starts to gather all ranks' tensors.

    Args:
        x: of one shape on all ranks.
        ranks: of the group.

    Returns:
        What waits and gives them in the order of the ranks, [degree, *x.shape].
    """
    x = x.contiguous()
    # Not the functional one: on gloo it corrupts the heap, once in some million calls (torch 2.13).
    gathered = x.new_empty(ranks.degree, *x.shape)
    work = ranks.group._allgather_base(gathered.view(-1), x.view(-1))
    return functools.partial(_arrived, work, gathered, x)


def start_scatter(parts: torch.Tensor, ranks: Ranks) -> Callable[[], torch.Tensor]:
    """Starts to sum tensors over the ranks, a part for each.

    Args:
        parts: [degree, ...], contiguous.
        ranks: of the group.

    Returns:
        What waits and gives the sum of this rank's parts.
    """
    coming = _ops.reduce_scatter_tensor(parts, "sum", ranks.degree, ranks.group.group_name)
    return lambda: _ops.wait_tensor(coming)[0]


def reduced(x: torch.Tensor, ranks: Ranks, operation: str = "sum") -> torch.Tensor:
    """The sum, or the "max", over the ranks, on all of them."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), operation, ranks.group.group_name))


def _arrived(work: dist.Work, gathered: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """Waits; `sent` is given so that it lives until then."""
    work.wait()
    return gathered


def joined(parts: torch.Tensor) -> torch.Tensor:
    """Shares of tokens put together, [degree, ..., S, D] to [..., T, D]."""
    return parts.movedim(0, -3).flatten(-3, -2)


def shares(x: torch.Tensor, degree: int) -> torch.Tensor:
    """Tokens cut into shares, [..., T, D] to contiguous [degree, ..., S, D]."""
    return x.unflatten(-2, (degree, -1)).movedim(-3, 0).contiguous()


def gather_tokens(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """[..., S, D] of each rank to [..., T, D]; the backward sums the ranks' gradients."""
    return _Gather.apply(x, ranks)  # pyright: ignore[reportReturnType]


def scatter_tokens(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Each rank's summand [..., T, D] to its share [..., S, D] of the sum; the backward gathers."""
    return _Scatter.apply(x, ranks)  # pyright: ignore[reportReturnType]


def copy(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """x itself; the backward sums the ranks' gradients."""
    return _Copy.apply(x, ranks)  # pyright: ignore[reportReturnType]


def reduce(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum over the ranks; the backward hands the gradient on, which is the same on all of them."""
    return _Reduce.apply(x, ranks)  # pyright: ignore[reportReturnType]


def gather_columns(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """[..., V / degree] of each rank to [..., V]; the backward keeps this rank's part of a gradient that is the same on
    all of them.
    """
    return _GatherColumns.apply(x, ranks)  # pyright: ignore[reportReturnType]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return joined(start_gather(x, ranks)())

    @staticmethod
    def backward(ctx, *grad_outputs):
        return start_scatter(shares(grad_outputs[0], ctx.ranks.degree), ctx.ranks)(), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return start_scatter(shares(x, ranks.degree), ranks)()

    @staticmethod
    def backward(ctx, *grad_outputs):
        return joined(start_gather(grad_outputs[0], ctx.ranks)()), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return reduced(grad_outputs[0], ctx.ranks), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        return reduced(x, ranks)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0], None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return start_gather(x, ranks)().movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0].chunk(ctx.ranks.degree, -1)[ctx.ranks.rank], None
