"""Carrying tokens to the experts and back, where all experts are on one device.

    rows[r] = x[token(r)]                      r: choices in the order of their experts
    y[n] = sum_k w[n, k] rows'[slot(n, k)]

A dispatcher is handed to the layer as a function; one that spreads experts over ranks sorts, gathers and combines by
the same functions, with an exchange between. The backward of each gather is a gather, so no two threads add to the same
element and bits do not depend on their order.
Source of the idea: MegaBlocks, arXiv:2211.15841, section 5.2 (permutation in place of one-hot products).

N tokens, K experts of a token, R rows (N K choices), D model width, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Plan:
    """Choices sorted by expert; within an expert, by token.

    Attributes:
        choice_R: the choice n K + k that each row is for. Dropped ones are the last rows, of no expert.
        slot_NK: the row of each choice.
        counts_E: rows of each expert, int64.
        dropped_NK: which choices were dropped; None where none can be.
    """

    choice_R: torch.Tensor
    slot_NK: torch.Tensor
    counts_E: torch.Tensor
    dropped_NK: torch.Tensor | None


class Dispatched(Protocol):
    """Tokens at their experts."""

    def receive(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens, waited for where they are on their way.

        Returns:
            rows_RD in the order of the experts that are here, and counts_E, int64 rows of each of these experts; rows
            beyond their sum belong to none.
        """
        ...

    def combine(self, y_RD: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts.

        Args:
            y_RD: what the experts made of the rows received.
            weights_NK: of each choice; those of dropped ones are left out.

        Returns:
            y_ND in the dtype of y_RD.
        """
        ...


Dispatch = Callable[[torch.Tensor, torch.Tensor, int, bool], Dispatched]
"""(x_ND, experts_NK, E, some may be dropped) -> the tokens at their experts; a dropped choice's expert is E."""


@dataclass(frozen=True)
class _Local:
    rows_RD: torch.Tensor
    plan: Plan

    def receive(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows_RD, self.plan.counts_E

    def combine(self, y_RD: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        return combine_rows(y_RD, weights_NK, self.plan)


def dispatch_locally(x_ND: torch.Tensor, experts_NK: torch.Tensor, num_experts: int, may_drop: bool) -> Dispatched:
    """The dispatcher of one device: sorts tokens by expert.

    Args:
        x_ND: tokens.
        experts_NK: int64, `num_experts` where a choice was dropped.
        num_experts: E.
        may_drop: whether any was.

    Returns:
        The tokens at their experts.
    """
    plan = sort_by_expert(experts_NK, num_experts, may_drop)
    return _Local(gather_rows(x_ND, plan), plan)


def sort_by_expert(experts_NK: torch.Tensor, num_experts: int, may_drop: bool) -> Plan:
    """Plans the rows.

    Args:
        experts_NK: int64, `num_experts` where a choice was dropped.
        num_experts: E.
        may_drop: whether any was.

    Returns:
        The plan; its shapes do not depend on the choices, so that the host need not wait for them.
    """
    experts_R = experts_NK.flatten()
    choice_R = experts_R.argsort(stable=True)
    slot_R = torch.empty_like(choice_R).scatter_(0, choice_R, torch.arange(len(choice_R), device=choice_R.device))
    dropped_NK = experts_NK == num_experts if may_drop else None
    return Plan(choice_R, slot_R.view_as(experts_NK), count_choices(experts_NK, num_experts), dropped_NK)


def count_choices(experts_NK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How often each expert is chosen, int64 [E]; dropped choices count for none."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts_NK.device)
    return counts.scatter_add_(0, experts_NK.flatten(), torch.ones_like(experts_NK).flatten())[:num_experts]


def gather_rows(x_ND: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Tokens as rows_RD in the order of the plan."""
    return _Gather.apply(x_ND, plan.choice_R, plan.slot_NK, plan.dropped_NK)


def combine_rows(y_RD: torch.Tensor, weights_NK: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The weighted sum over each token's rows, y_ND in the dtype of y_RD."""
    return _Combine.apply(y_RD, weights_NK.to(y_RD.dtype), plan.choice_R, plan.slot_NK, plan.dropped_NK)


def _rows_of_tokens(y_RD: torch.Tensor, slot_NK: torch.Tensor, dropped_NK: torch.Tensor | None) -> torch.Tensor:
    """[N, K, D]; rows of no expert hold anything, not-a-numbers too, and become 0."""
    y_NKD = y_RD[slot_NK]
    return y_NKD if dropped_NK is None else y_NKD.masked_fill_(dropped_NK[..., None], 0.0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, choice_R, slot_NK, dropped_NK):
        ctx.save_for_backward(slot_NK, dropped_NK)
        return x_ND[choice_R // slot_NK.shape[1]]

    @staticmethod
    def backward(ctx, *grad_outputs):
        return _rows_of_tokens(grad_outputs[0], *ctx.saved_tensors).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """Keeps the rows where they are and gathers them again in the backward: [N, K, D] is not kept."""

    @staticmethod
    def forward(ctx, y_RD, weights_NK, choice_R, slot_NK, dropped_NK):
        ctx.save_for_backward(y_RD, weights_NK, choice_R, slot_NK, dropped_NK)
        return torch.bmm(weights_NK[:, None], _rows_of_tokens(y_RD, slot_NK, dropped_NK))[:, 0]

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad_ND,) = grad_outputs
        y_RD, weights_NK, choice_R, slot_NK, dropped_NK = ctx.saved_tensors
        if dropped_NK is not None:
            weights_NK = weights_NK.masked_fill(dropped_NK, 0.0)
        grad_y_RD = grad_ND[choice_R // slot_NK.shape[1]] * weights_NK.flatten()[choice_R, None]
        grad_weights_NK = torch.bmm(_rows_of_tokens(y_RD, slot_NK, dropped_NK), grad_ND[..., None])[..., 0]
        return grad_y_RD, grad_weights_NK, None, None, None
