"""Experts of which every rank holds a slice of the hidden width: tokens come from all ranks, partial sums go back.

    y[n] = sum_k w[n, k] sum over ranks of expert'[n, k](x)         expert': the slice of a rank

What carries tokens to experts on one device, or between expert-parallel ranks, works inside. Weights enter as tokens
do: a rank's gradient of them is of its slice alone, so that the router's would be partial without the sum.

N tokens, K experts of a token, R rows, D model width, E experts.
"""

from dataclasses import dataclass

import torch

from drumline.models.moe import Dispatch, Dispatched
from drumline.parallel.tensor.collectives import Ranks, joined, start_gather
from drumline.parallel.tensor.tokens import Tokens


@dataclass(frozen=True)
class _Entered:
    inner: Dispatched
    tokens: Tokens

    def receive(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner.receive()

    def combine(self, y_RD: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        return self.tokens.leave(self.inner.combine(y_RD, self.tokens.enter(weights_NK)))


class SharedExperts:
    """A `Dispatch` for experts of which each rank holds a slice.

    Args:
        inner: carries the tokens that have entered.
        tokens: how they enter and leave.
        ranks: that hold shares of the tokens; None: all ranks hold all of them.
    """

    def __init__(self, inner: Dispatch, tokens: Tokens, ranks: Ranks | None):
        self._inner = inner
        self._tokens = tokens
        self._ranks = ranks

    def __call__(self, x_ND: torch.Tensor, experts_NK: torch.Tensor, num_experts: int, may_drop: bool) -> Dispatched:
        """As `Dispatch`."""
        if self._ranks is not None:
            experts_NK = joined(start_gather(experts_NK, self._ranks)())
        return _Entered(self._inner(self._tokens.enter(x_ND), experts_NK, num_experts, may_drop), self._tokens)
