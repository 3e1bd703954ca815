"""What the routers of a model did in a step: summed over micro-batches and ranks, reported, and fed to the balance."""

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from drumline.models import Layers, Routed, update_balance
from drumline.models.moe import MixtureOfExperts
from drumline.recipe.sections import Model
from drumline.train.records import RouterRecord

SumOverRanks = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
"""([N], dtype) -> the sum over the ranks that saw different tokens."""


class RoutingTally:
    """Sums the reports of a step's micro-batches.

    Args:
        model: the decoder, or a rank's part of it; its blocks with experts are balanced.
        sum_over_ranks: adds the counts of all ranks; once a step, or never for a dense model.
        counts: whether this rank is the one that speaks for those that saw the same tokens.
    """

    def __init__(self, model: nn.Module, sum_over_ranks: SumOverRanks, *, counts: bool = True):
        shape: Model = model.shape  # pyright: ignore[reportAssignmentType]
        further = ((shape.num_layers + depth, module.block) for depth, module in enumerate(model.mtp))  # pyright: ignore
        blocks = (*cast(Layers, model.layers).items(), *further)
        num_blocks = shape.num_layers + shape.num_mtp_layers
        self._all = [index for index in range(num_blocks) if shape.is_moe_layer(index)]
        self._moe = shape.moe
        self._layers = {index: block.mlp for index, block in blocks if isinstance(block.mlp, MixtureOfExperts)}
        self._device = next(model.parameters()).device
        self._sum_over_ranks = sum_over_ranks
        self._speaks = counts
        self._counts: dict[int, torch.Tensor] = {}
        self._entropy: dict[int, torch.Tensor] = {}

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return bool(self._all)

    def add(self, layer: int, routed: Routed) -> None:
        """Takes the report of one layer on one micro-batch; given to the model's forward."""
        counts = torch.cat((routed.counts_E, routed.num_dropped.reshape(1))) * self._speaks
        entropy = routed.entropy.double().reshape(1) * self._speaks
        self._counts[layer] = self._counts[layer] + counts if layer in self._counts else counts
        self._entropy[layer] = self._entropy[layer] + entropy if layer in self._entropy else entropy

    def finish(self, *, with_load: bool) -> RouterRecord | None:
        """Ends a step: moves the balance of every layer by the counts of the global batch, and forgets them.

        Args:
            with_load: the record has the load of every expert.

        Returns:
            The record; None for a dense model. The same on every rank.
        """
        if self._moe is None or not self._all:
            return None
        # Every rank names every layer, and says 0 of those that it does not hold.
        no_counts = torch.zeros(self._moe.num_experts + 1, dtype=torch.int64, device=self._device)
        no_entropy = torch.zeros(1, dtype=torch.float64, device=self._device)
        counts_LE1 = torch.stack([self._counts.get(layer, no_counts) for layer in self._all])
        summed = self._sum_over_ranks(counts_LE1.flatten(), torch.int64).view_as(counts_LE1)
        counts_LE, dropped_L = summed[:, :-1], summed[:, -1]
        entropy_L = torch.cat([self._entropy.get(layer, no_entropy) for layer in self._all])
        entropy_L = self._sum_over_ranks(entropy_L, torch.float64)
        self._counts, self._entropy = {}, {}
        counts = dict(zip(self._all, counts_LE, strict=True))
        update_balance(self._layers, {layer: counts[layer] for layer in self._layers})
        moe = self._moe
        num_choices = int(counts_LE[0].sum())
        even = num_choices / counts_LE.shape[1]
        return RouterRecord(
            layers=tuple(self._all),
            load_max=tuple((counts_LE.amax(1).double() / even).tolist()),
            load_min=tuple((counts_LE.amin(1).double() / even).tolist()),
            entropy=tuple((entropy_L * moe.experts_per_token / num_choices).tolist()),
            dropped=tuple((dropped_L.double() / num_choices).tolist()),
            load=tuple(tuple(row) for row in counts_LE.tolist()) if with_load else None,
        )
