"""Micro-batches through a model of invariant operators, in the mode that refuses all others."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drumline.data import Batch
from drumline.models import TABLES
from drumline.numerics.invariant import strict
from drumline.parallel.pipeline import Watch
from drumline.train.step import OnAhead, OnRouted, Passes


@dataclass(frozen=True)
class Strictly:
    """Passes, forwards and backwards, within strict mode.

    Attributes:
        inner: what takes the micro-batches.
    """

    inner: Passes

    @property
    def placement(self) -> tuple[int, ...]:
        """As `Passes`."""
        return self.inner.placement

    def forward_backward(
        self,
        batches: Sequence[Batch],
        num_tokens: int,
        on_routed: OnRouted | None = None,
        on_ahead: OnAhead | None = None,
        watch: Watch | None = None,
    ) -> torch.Tensor:
        """As `Passes`."""
        with strict(also=TABLES):
            return self.inner.forward_backward(batches, num_tokens, on_routed, on_ahead, watch)

    def loss(self, batches: Sequence[Batch]) -> torch.Tensor:
        """As `Passes`."""
        with strict(also=TABLES):
            return self.inner.loss(batches)
