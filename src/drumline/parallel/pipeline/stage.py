"""One stage of a pipeline: what an action computes, and what is kept between the actions of a micro-batch.

    F  x_out, a = part(x_in)                        keeps x_in and the graph
    B  (d x_in, d W) from d x_out                   drops both
    I  d x_in alone, and the gradients that arrive where a weight joins the way to x_in
    W  d W from those, then drops all

The balancing loss a of a mixture of experts is a sum over the layers of all stages that is added to the loss. So its
gradient is known without the stages behind: it is that of the loss, 1 / valid tokens, and nothing is sent for it.
The first stage has no x_in: its I does nothing, and its W is the whole backward.
The split of the backward is torch's own. Source: Qi et al. 2024, arXiv:2401.10241, section 2 (B and W there).

B sequences, T tokens, D model width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from drumline.data import Batch
from drumline.models import Routed
from drumline.parallel.gradients import Gradients
from drumline.parallel.shard import keep_gathered, take_gradients
from drumline.schedules import Action, Kind

OnRouted = Callable[[int, Routed], None]
OnAhead = Callable[[torch.Tensor], None]


@dataclass
class _Kept:
    """What a micro-batch leaves in a stage between its actions."""

    hidden_BTD: torch.Tensor | None
    roots: list[torch.Tensor]
    grads: list[torch.Tensor] = field(default_factory=list)
    param_groups: list[dict[str, Any]] | None = None


class Stage:
    """A part of the model with its micro-batches in flight.

    Args:
        part: the module.
        gradients: of its parameters.
    """

    def __init__(self, part: nn.Module, gradients: Gradients):
        self.part = part
        self.gradients = gradients
        self._kept: dict[int, _Kept] = {}

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose backward is not done."""
        return len(self._kept)

    def forward(
        self,
        index: int,
        batch: Batch,
        hidden_BTD: torch.Tensor | None,
        num_tokens: int,
        on_routed: OnRouted | None,
        on_ahead: OnAhead | None,
    ) -> torch.Tensor:
        """Runs F.

        Args:
            index: of the micro-batch.
            batch: the micro-batch, [B, T].
            hidden_BTD: from the stage before; None in the first.
            num_tokens: valid tokens of the global batch.
            on_routed: is told what each layer's router did.
            on_ahead: is told the losses of tokens further ahead.

        Returns:
            hidden_BTD for the next stage, or in the last the micro-batch's share of the loss; detached.
        """
        if hidden_BTD is not None:
            hidden_BTD.requires_grad_()
        options: dict[str, Any] = {"places_BT": batch.places_BT}
        if on_routed is not None:
            options["on_routed"] = on_routed
        if batch.ahead:
            options |= {"ahead": batch.ahead, "on_ahead": on_ahead}
        result = call(self.part, batch, hidden_BTD, **options)
        if isinstance(result, tuple):
            out_BTD, aux_loss = result
            roots = [out_BTD, aux_loss / max(1, num_tokens)]
        else:
            roots = [result / max(1, num_tokens)]
        self._kept[index] = _Kept(hidden_BTD, [root for root in roots if root.requires_grad])
        return roots[0].detach()

    def backward(self, action: Action, grad_BTD: torch.Tensor | None) -> torch.Tensor | None:
        """Runs B, I or W.

        Args:
            action: what to run; its micro-batch has had its F.
            grad_BTD: the gradient of what F gave; None in the last stage, and for W.

        Returns:
            The gradient of hidden_BTD; None in the first stage, and of W.
        """
        kept = self._kept[action.microbatch]
        if action.kind is not Kind.WEIGHT:
            kept.grads = [torch.ones_like(root) for root in kept.roots]
            if grad_BTD is not None:
                kept.grads[0] = grad_BTD
        is_whole = action.kind is Kind.BACKWARD or (action.kind is Kind.WEIGHT and kept.hidden_BTD is None)
        if is_whole:
            torch.autograd.backward(kept.roots, kept.grads)  # pyright: ignore[reportArgumentType]
        elif action.kind is Kind.WEIGHT:
            assert kept.param_groups is not None
            # Weights may meet the way to the input in places that lie on each other's paths: no part of the graph may
            # be freed before all of them are done.
            stage_backward_weight(self._weights(), kept.param_groups, retain_graph=True)
        elif kept.hidden_BTD is not None:
            _, kept.param_groups = stage_backward_input(kept.roots, kept.grads, [kept.hidden_BTD], self._weights())
            kept.roots, kept.grads = [], []
        hidden_BTD = kept.hidden_BTD
        if action.kind is not Kind.INPUT:
            del self._kept[action.microbatch]
        return None if hidden_BTD is None or action.kind is Kind.WEIGHT else hidden_BTD.grad

    def hold_gradients(self) -> None:
        """Before a step that splits the backward: its weight gradients come without autograd's hooks, so that nothing
        is reduced until `take_gradients` says so.
        """
        self.gradients.set_sync(False)
        if isinstance(self.part, FSDPModule):
            keep_gathered(self.part)

    def take_gradients(self, *, is_last: bool) -> None:
        """After the weight gradients of a micro-batch, in a step that splits the backward.

        Args:
            is_last: they were the step's last of this stage.
        """
        if isinstance(self.part, FSDPModule):
            take_gradients(self.part, is_last=is_last)

    def _weights(self):
        # Asked for each time: sharding puts gathered parameters in the places of sharded ones.
        return iter([param for param in self.part.parameters() if param.requires_grad])


def call(part: nn.Module, batch: Batch, hidden_BTD: torch.Tensor | None, **options: Any) -> Any:
    """Runs the forward of a part on a micro-batch."""
    return part(batch.tokens_BT, hidden_BTD=hidden_BTD, starts_BT=batch.starts_BT, labels_BT=batch.labels_BT, **options)
