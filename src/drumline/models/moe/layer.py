"""A mixture of experts in place of a block's feed-forward.

    y = sum over the token's K experts of w_e expert_e(x)  +  shared(x), times sigmoid(v . x) where it is gated

Sources: Shazeer et al. 2017, arXiv:1701.06538; shared experts: DeepSeekMoE, arXiv:2401.06066; their gate: the
`transformers` implementation of Qwen2-MoE.

B sequences, T tokens of each, N = B T tokens, D model width, E experts, K experts of a token.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from drumline.models.layers import FeedForward, Linear
from drumline.models.moe.balance import balance_loss
from drumline.models.moe.dispatch import Dispatch, count_choices
from drumline.models.moe.experts import Experts
from drumline.models.moe.router import Router, Routing, within_capacity
from drumline.recipe.sections import Moe


class Routed(NamedTuple):
    """What a layer reports of the tokens it was given: sums, so that micro-batches and ranks add up.

    It is returned, not noted in the layer, so that a forward that activation checkpointing runs again counts once.

    Attributes:
        counts_E: how often each expert was chosen, dropped choices too; int64.
        num_dropped: choices that found no room; int64 scalar.
        entropy: of the router's probabilities, in nats, summed over tokens; scalar.
        aux_loss: what the layer adds to the summed loss; scalar, the only part with a gradient.
    """

    counts_E: torch.Tensor
    num_dropped: torch.Tensor
    entropy: torch.Tensor
    aux_loss: torch.Tensor


class MixtureOfExperts(nn.Module):
    """Router, experts and shared experts; `dispatch` carries tokens to the experts and back."""

    def __init__(self, moe: Moe, dim: int, dispatch: Dispatch, device: torch.device | str = "meta"):
        super().__init__()
        self.moe = moe
        self.dispatch = dispatch
        self.router = Router(moe, dim, device)
        self.experts = Experts(moe.num_experts, dim, moe.expert_hidden_dim, device)
        self.shared: FeedForward | None = None
        self.shared_gate: Linear | None = None
        if moe.num_shared_experts:
            self.shared = FeedForward(dim, moe.num_shared_experts * moe.expert_hidden_dim, device)
            if moe.shared_expert_gate:
                self.shared_gate = Linear(dim, 1, device)

    def forward(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, Routed]:
        x_ND = x_BTD.flatten(0, 1)
        routing = self.router(x_ND)
        experts_NK, may_drop = routing.experts_NK, self.moe.capacity_factor > 0
        if may_drop:
            experts_NK = within_capacity(experts_NK, x_BTD.shape[1], self.moe.num_experts, self.moe.capacity_factor)
        sent = self.dispatch(x_ND, experts_NK, self.moe.num_experts, may_drop)
        shared_ND = self._shared(x_ND)  # between the two, while a dispatcher may have tokens on their way
        y_ND = sent.combine(self.experts(*sent.receive()), routing.weights_NK)
        if shared_ND is not None:
            y_ND = y_ND + shared_ND
        return y_ND.view_as(x_BTD), self._report(routing, experts_NK)

    def _shared(self, x_ND: torch.Tensor) -> torch.Tensor | None:
        if self.shared is None:
            return None
        if self.shared_gate is None:
            return self.shared(x_ND)
        return self.shared_gate(x_ND).sigmoid() * self.shared(x_ND)

    def _report(self, routing: Routing, experts_NK: torch.Tensor) -> Routed:
        probability_NE, load_E = routing.probability_NE, self.router.load
        aux_loss = probability_NE.new_zeros(())
        if load_E is not None:
            aux_loss = self.moe.aux_loss_coefficient * balance_loss(probability_NE, load_E)
        return Routed(
            counts_E=count_choices(routing.experts_NK, self.moe.num_experts),
            num_dropped=(experts_NK == self.moe.num_experts).sum(),
            entropy=torch.special.entr(probability_NE.detach()).sum(),
            aux_loss=aux_loss,
        )


def update_balance(layers: Mapping[int, MixtureOfExperts], counts: Mapping[int, torch.Tensor]) -> None:
    """Moves the balance of every layer; once a step, after the optimizer.

    Args:
        layers: by index.
        counts: counts_E of the *global* batch, int64, by index of the layer.
    """
    for index, layer in layers.items():
        layer.router.update(counts[index])
