"""The stages of a rank as one model, and the embedding that the first and the last stage share.

A tied embedding is held by both; so is one that modules of multi-token prediction need behind the last stage. Each
computes a share of its gradient; the sum of the two is the gradient, on both, so that they stay equal bit for bit. One
of them counts it and writes it to checkpoints.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from drumline.parallel.gradients import Gradients, Several
from drumline.parallel.pipeline.transfer import Transfers
from drumline.parallel.place import to_local
from drumline.schedules import Action, Kind

TIED = "embedding.weight"
_GRADIENT = Action(0, Kind.WEIGHT, 0)


class Stages(nn.ModuleList):
    """Parts of a decoder whose parameters, buffers and modules have the names of the whole decoder.

    Args:
        parts: along the model; at least one.
    """

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__(parts)
        self.shape = parts[0].shape

    @property
    def layers(self) -> "_Chained":
        """The blocks of all parts."""
        return _Chained([part.layers for part in self])

    @property
    def mtp(self) -> list[nn.Module]:
        """The modules of multi-token prediction, which are behind the last layer."""
        return [module for part in self for module in cast(nn.ModuleList, part.mtp)]

    def named_modules(self, memo=None, prefix: str = "", remove_duplicate: bool = True):
        """Modules by the name that they have in the whole decoder; torch names parameters and buffers by it."""
        memo = set() if memo is None else memo
        for part in self:
            yield from part.named_modules(memo, prefix, remove_duplicate)


class _Chained:
    def __init__(self, layers: Sequence):
        self._layers = layers

    def __iter__(self) -> Iterator[nn.Module]:
        return (block for _, block in self.items())

    def items(self) -> Iterator[tuple[int, nn.Module]]:
        return (pair for layers in self._layers for pair in layers.items())


def share_embedding(first: nn.Module, last: nn.Module) -> None:
    """Lets the first and the last stage of one rank hold one tied embedding."""
    last.embedding.weight = first.embedding.weight  # pyright: ignore


class TiedAcrossRanks(Several):
    """Gradients of a rank's stages, of which one is the tied embedding's that another rank computes a share of, too.

    Args:
        parts: gradients of the stages.
        weight: the embedding; all of it or FSDP's shard, which is the same on the other rank.
        rank: of this process in the pipeline.
        other: the pipeline's rank of the other holder.
        peers: the world's rank of each rank of the pipeline.
        group: of those.
    """

    def __init__(
        self,
        parts: Sequence[Gradients],
        weight: nn.Parameter,
        *,
        rank: int,
        other: int,
        peers: Sequence[int],
        group: dist.ProcessGroup,
    ):
        super().__init__(parts)
        self._weight = weight
        self._is_lower = rank < other
        self._other = other
        self._peers = peers
        self._group = group

    def finish(self) -> None:
        """Sums the two shares, once each is the sum over its own stage's ranks."""
        super().finish()
        grad = self._weight.grad
        assert grad is not None, "both stages use the embedding in every step"
        local = to_local(grad)
        theirs = torch.empty_like(local, memory_format=torch.contiguous_format)
        transfers = Transfers(self._peers, self._group)
        if self._is_lower:  # the same order of transfers at both ends
            transfers.send(local.clone(), self._other)
            transfers.receive(_GRADIENT, theirs, self._other)
        else:
            transfers.receive(_GRADIENT, theirs, self._other)
            transfers.send(local.clone(), self._other)
        transfers.take(_GRADIENT)
        transfers.finish()
        local.add_(theirs)
