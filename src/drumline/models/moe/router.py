"""The router: which experts a token is sent to, and how much each of them counts.

    s = softmax(W x) or sigmoid(W x)                          scores, in fp32 at least
    chosen = the K largest of s + b                           within the token's best groups, where there are groups
    w = s[chosen], divided by its sum if so wanted, times routed_scaling

The bias b moves the choice only, never the weights. A group is judged by its best expert under softmax, and under
sigmoid by the sum of its two best.
Sources: Shazeer et al. 2017, arXiv:1701.06538; Qwen3, arXiv:2505.09388; sigmoid, bias and the groups' two best:
DeepSeek-V3, arXiv:2412.19437, section 2.1.2; the groups' best: DeepSeek-V2, arXiv:2405.04434, section 2.2.2.

N tokens, D model width, E experts, K experts of a token, B sequences, T tokens of a sequence.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from drumline.models.moe.balance import next_bias, next_load
from drumline.recipe.sections import Moe

_SMALLEST_SUM = 1e-20  # sigmoids may all underflow; DeepSeek's constant


class Routing(NamedTuple):
    """What the router says.

    Attributes:
        experts_NK: int64; E, which is no expert, where a choice was dropped.
        weights_NK: of each choice, fp32 at least.
        probability_NE: scores that sum to 1 over the experts.
        logits_NE: what the scores are made of, fp32 at least.
    """

    experts_NK: torch.Tensor
    weights_NK: torch.Tensor
    probability_NE: torch.Tensor
    logits_NE: torch.Tensor


class Router(nn.Module):
    """Scores the experts for each token and chooses.

    What balances the load is a buffer of the layer, since it is state of the run and no gradient moves it: `bias` for
    `balance = "bias"`, and `load`, how often each expert was chosen a token, for `balance = "aux_loss"`.
    """

    bias: torch.Tensor | None
    load: torch.Tensor | None

    def __init__(self, moe: Moe, dim: int, device: torch.device | str = "meta"):
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, dim, dtype=torch.float32, device=device))
        zeros_E = torch.zeros(moe.num_experts, dtype=torch.float32, device=device)
        self.register_buffer("bias", zeros_E if moe.balance == "bias" else None)
        self.register_buffer("load", zeros_E if moe.balance == "aux_loss" else None)

    def forward(self, x_ND: torch.Tensor) -> Routing:
        # Rounded to x's dtype first, as sharding does that gathers weights in it: so both compute the same.
        dtype = torch.promote_types(x_ND.dtype, torch.float32)
        logits_NE = F.linear(x_ND.to(dtype), self.weight.to(x_ND.dtype).to(dtype))
        scores_NE = probability_NE = scores(logits_NE, self.moe)
        if self.moe.scoring != "softmax":
            probability_NE = scores_NE / (scores_NE.sum(-1, keepdim=True) + _SMALLEST_SUM)
        return Routing(*choose(scores_NE, self.moe, self.bias), probability_NE, logits_NE)

    @torch.no_grad()
    def update(self, counts_E: torch.Tensor) -> None:
        """Moves the balance by one step.

        Args:
            counts_E: how often each expert was chosen in the *global* batch.
        """
        if self.bias is not None:
            self.bias.copy_(next_bias(self.bias, counts_E, self.moe.bias_update_speed))
        if self.load is not None:
            self.load.copy_(next_load(counts_E, self.moe.experts_per_token))


def choose(scores_NE: torch.Tensor, moe: Moe, bias_E: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each token's experts.

    Args:
        scores_NE: positive scores.
        moe: says how.
        bias_E: added to the scores for the choice alone; None: nothing is.

    Returns:
        experts_NK, int64, and weights_NK, through which gradients flow into the scores.
    """
    wanted_NE = scores_NE.detach() if bias_E is None else scores_NE.detach() + bias_E
    if moe.num_expert_groups > 1:
        wanted_NE = wanted_NE.masked_fill(~_in_best_groups(wanted_NE, moe), -math.inf)
    experts_NK = wanted_NE.topk(moe.experts_per_token, dim=-1).indices
    return experts_NK, weigh(scores_NE, moe, experts_NK)


def scores(logits_NE: torch.Tensor, moe: Moe) -> torch.Tensor:
    """Positive scores of logits."""
    return logits_NE.softmax(-1) if moe.scoring == "softmax" else logits_NE.sigmoid()


def weigh(scores_NE: torch.Tensor, moe: Moe, experts_NK: torch.Tensor) -> torch.Tensor:
    """What each choice counts, weights_NK.

    Args:
        scores_NE: positive scores.
        moe: says how.
        experts_NK: the choices; none is E.

    Returns:
        weights_NK, through which gradients flow into the scores.
    """
    weights_NK = scores_NE.gather(1, experts_NK)
    if moe.normalize_weights:
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return weights_NK * moe.routed_scaling if moe.routed_scaling != 1.0 else weights_NK


def _in_best_groups(wanted_NE: torch.Tensor, moe: Moe) -> torch.Tensor:
    grouped = wanted_NE.unflatten(-1, (moe.num_expert_groups, -1))
    judged = grouped.topk(2, dim=-1).values.sum(-1) if moe.scoring == "sigmoid" else grouped.amax(-1)
    best = judged.topk(moe.groups_per_token, dim=-1).indices
    is_best = torch.zeros_like(judged, dtype=torch.bool).scatter_(-1, best, True)
    return is_best[..., None].expand_as(grouped).flatten(-2)


def within_capacity(experts_NK: torch.Tensor, num_tokens: int, num_experts: int, capacity_factor: float):
    """Drops the choices that an expert has no room for.

    An expert takes at most ceil(capacity_factor * T K / E) choices of a *sequence*, those of earlier tokens first. So
    what is dropped depends neither on how the batch is cut and spread, nor on later tokens.
    Source: GShard, arXiv:2006.16668, section 3.2, whose group is here the sequence.

    Args:
        experts_NK: of whole sequences, one after the other.
        num_tokens: T.
        num_experts: E.
        capacity_factor: 1 is room for an even load.

    Returns:
        As experts_NK, with E where a choice is dropped.
    """
    num_choices = num_tokens * experts_NK.shape[1]
    capacity = math.ceil(capacity_factor * num_choices / num_experts)
    experts_BS = experts_NK.reshape(-1, num_choices)
    sorted_BS, order_BS = experts_BS.sort(dim=1, stable=True)
    counts_BE = torch.zeros(len(experts_BS), num_experts, dtype=torch.int64, device=experts_NK.device)
    counts_BE.scatter_add_(1, experts_BS, torch.ones_like(experts_BS))
    first_BE = counts_BE.cumsum(1) - counts_BE
    place_BS = torch.arange(num_choices, device=experts_NK.device) - first_BE.gather(1, sorted_BS)
    kept_BS = sorted_BS.masked_fill(place_BS >= capacity, num_experts)
    return torch.empty_like(experts_BS).scatter_(1, order_BS, kept_BS).view_as(experts_NK)
