"""What the routers of a model did in a step: summed over micro-batches and ranks, reported, and fed to the balance."""

from collections.abc import Callable

import torch
from torch import nn

from drumline.models import Routed, update_balance
from drumline.models.moe import MixtureOfExperts
from drumline.train.records import RouterRecord

SumOverRanks = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
"""([N], dtype) -> the sum over the ranks that saw different tokens."""


class RoutingTally:
    """Sums the reports of a step's micro-batches.

    Args:
        model: the decoder; its blocks with experts are balanced.
        sum_over_ranks: adds the counts of all ranks; once a step, or never for a dense model.
    """

    def __init__(self, model: nn.Module, sum_over_ranks: SumOverRanks):
        layers = enumerate(block.mlp for block in model.layers)  # pyright: ignore[reportGeneralTypeIssues]
        self._layers = {index: mlp for index, mlp in layers if isinstance(mlp, MixtureOfExperts)}
        self._sum_over_ranks = sum_over_ranks
        self._counts: dict[int, torch.Tensor] = {}
        self._entropy: dict[int, torch.Tensor] = {}

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return bool(self._layers)

    def add(self, layer: int, routed: Routed) -> None:
        """Takes the report of one layer on one micro-batch; given to the model's forward."""
        counts = torch.cat((routed.counts_E, routed.num_dropped.reshape(1)))
        entropy = routed.entropy.double().reshape(1)
        self._counts[layer] = self._counts[layer] + counts if layer in self._counts else counts
        self._entropy[layer] = self._entropy[layer] + entropy if layer in self._entropy else entropy

    def finish(self, *, with_load: bool) -> RouterRecord | None:
        """Ends a step: moves the balance of every layer by the counts of the global batch, and forgets them.

        Args:
            with_load: the record has the load of every expert.

        Returns:
            The record; None for a dense model. The same on every rank.
        """
        if not self._layers:
            return None
        counts_LE1 = torch.stack([self._counts[layer] for layer in self._layers])
        summed = self._sum_over_ranks(counts_LE1.flatten(), torch.int64).view_as(counts_LE1)
        counts_LE, dropped_L = summed[:, :-1], summed[:, -1]
        entropy_L = self._sum_over_ranks(torch.cat([self._entropy[layer] for layer in self._layers]), torch.float64)
        self._counts, self._entropy = {}, {}
        update_balance(self._layers, dict(zip(self._layers, counts_LE, strict=True)))
        moe = next(iter(self._layers.values())).moe
        num_choices = int(counts_LE[0].sum())
        even = num_choices / counts_LE.shape[1]
        return RouterRecord(
            layers=tuple(self._layers),
            load_max=tuple((counts_LE.amax(1).double() / even).tolist()),
            load_min=tuple((counts_LE.amin(1).double() / even).tolist()),
            entropy=tuple((entropy_L * moe.experts_per_token / num_choices).tolist()),
            dropped=tuple((dropped_L.double() / num_choices).tolist()),
            load=tuple(tuple(row) for row in counts_LE.tolist()) if with_load else None,
        )
