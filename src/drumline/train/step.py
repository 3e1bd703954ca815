"""One optimizer step, to be read from top to bottom."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from drumline.comm import World
from drumline.data import Batch
from drumline.models import Routed
from drumline.optimizers import clip
from drumline.parallel import Gradients, Mesh, free_gathered
from drumline.parallel.pipeline import Watch
from drumline.schedules import Action, Kind

OnRouted = Callable[[int, Routed], None]
OnAhead = Callable[[torch.Tensor], None]
ReduceScalars = Callable[[torch.Tensor, Sequence[torch.Tensor]], tuple[float, float]]
"""This rank's losses and the gradients that it counts -> the sum of the losses and of the squares, over all ranks."""


@dataclass(frozen=True)
class StepResult:
    """What one step gives: the mean loss over the global batch's valid tokens, the global gradient norm before
    clipping.
    """

    loss: float
    grad_norm: float


class Passes(Protocol):
    """How micro-batches go through the model, forwards and backwards: one after the other, or through a pipeline."""

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank in the pipeline of each stage of the model."""
        ...

    def forward_backward(
        self,
        batches: Sequence[Batch],
        num_tokens: int,
        on_routed: OnRouted | None = None,
        on_ahead: OnAhead | None = None,
        watch: Watch | None = None,
    ) -> torch.Tensor:
        """Accumulates the gradients of all micro-batches.

        Args:
            batches: this rank's micro-batches, each [B, T].
            num_tokens: valid tokens of the global batch.
            on_routed: is told what each layer's router did.
            on_ahead: is told the losses of tokens further ahead, where the batches have any. Their gradients are
                normalized by the count of next tokens, as in DeepSeek-V3's equation 24.
            watch: is told of each forward and backward.

        Returns:
            losses_M, this rank's share of each micro-batch's loss, fp32 on the device.
        """
        ...

    def loss(self, batches: Sequence[Batch]) -> torch.Tensor:
        """This rank's share of each micro-batch's summed loss, without gradients; losses_M."""
        ...


def train_step(
    batches: Sequence[Batch],
    num_tokens: int,
    lr: float,
    *,
    passes: Passes,
    gradients: Gradients,
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float,
    reduce_scalars: ReduceScalars,
    check_finite: Callable[[StepResult, Sequence[Batch]], None],
    on_routed: OnRouted | None = None,
    on_ahead: OnAhead | None = None,
    watch: Watch | None = None,
) -> StepResult:
    """Trains on this rank's micro-batches of one global batch.

    Args:
        batches: the micro-batches, each [B, T], on the model's device.
        num_tokens: valid tokens of the *global* batch: the loss is normalized by it, so that uneven micro-batches
            weigh right.
        lr: learning rate of this step.
        passes: takes the micro-batches through the model.
        gradients: brings the gradients to their sum over the data-parallel ranks.
        optimizer: steps on the clipped gradients.
        max_grad_norm: clip to this; 0: never.
        reduce_scalars: this rank's losses and the gradients that it counts -> the global loss and the global sum of
            squares.
        check_finite: raises where the result is not finite, before any weight has moved.
        on_routed: is told what each layer's router did; None: the model is dense.
        on_ahead: is told the losses of tokens further ahead, where the batches have any.
        watch: is told of each forward and backward.

    Returns:
        Loss and gradient norm.
    """
    gradients.zero_grad()
    losses_M = passes.forward_backward(batches, num_tokens, on_routed, on_ahead, watch)
    gradients.finish()
    loss_sum, square_sum = reduce_scalars(losses_M, gradients.counted())
    result = StepResult(loss_sum, square_sum**0.5)
    # Reading the two scalars here makes the host wait once a step: weights must not move on a result that is not
    # finite.
    check_finite(result, batches)
    clip(gradients.local(), result.grad_norm, max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return result


@dataclass(frozen=True)
class InTurn:
    """Takes each micro-batch forwards and backwards before the next.

    Attributes:
        model: gives the sum of the cross-entropy over valid tokens.
        gradients: told which backward is the step's last.
        placement: one stage, on one rank.
    """

    model: nn.Module
    gradients: Gradients
    placement: tuple[int, ...] = (0,)

    def forward_backward(
        self,
        batches: Sequence[Batch],
        num_tokens: int,
        on_routed: OnRouted | None = None,
        on_ahead: OnAhead | None = None,
        watch: Watch | None = None,
    ) -> torch.Tensor:
        """As `Passes`."""
        losses = []
        options: dict[str, Any] = {} if on_routed is None else {"on_routed": on_routed}
        for index, batch in enumerate(batches):
            self.gradients.set_sync(index == len(batches) - 1)
            self.gradients.begin(index)
            if batch.ahead:
                options |= {"ahead": batch.ahead, "on_ahead": on_ahead}
            if watch is not None:
                watch.begin(Action(0, Kind.FORWARD, index))
            loss = self.model(batch.tokens_BT, starts_BT=batch.starts_BT, labels_BT=batch.labels_BT, **options)
            loss = loss / max(1, num_tokens)
            if watch is not None:
                watch.end()
                watch.begin(Action(0, Kind.BACKWARD, index))
            loss.backward()
            self.gradients.end(index)
            if watch is not None:
                watch.end()
            losses.append(loss.detach())
        return torch.stack(losses)

    @torch.no_grad()
    def loss(self, batches: Sequence[Batch]) -> torch.Tensor:
        """As `Passes`."""
        losses = (
            self.model(batch.tokens_BT, starts_BT=batch.starts_BT, labels_BT=batch.labels_BT) for batch in batches
        )
        return torch.stack(list(losses))


@torch.no_grad()
def validate(
    passes: Passes,
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    world: World,
    mesh: Mesh,
    reduce_scalars: ReduceScalars,
) -> tuple[float, int]:
    """The mean loss over held-out batches.

    Args:
        passes: takes the micro-batches through the model.
        model: what the passes leave gathered is freed.
        steps: this rank's micro-batches of each validation batch; the same number on every rank.
        world: over which counts are summed.
        mesh: says which ranks have the same tokens.
        reduce_scalars: as for `train_step`.

    Returns:
        Loss a token and the number of valid tokens, both over all ranks.
    """
    losses, num_tokens = [], 0
    for batches in steps:
        losses.append(passes.loss(batches))
        num_tokens += count_valid(batches, mesh)
    free_gathered(model)
    count = int(world.sum([num_tokens], torch.int64)[0])
    total, _ = reduce_scalars(torch.cat(losses), [])
    return total / max(1, count), count


def count_valid(batches: Sequence[Batch], mesh: Mesh) -> int:
    """Tokens whose label counts, on the first of the ranks that have the same tokens; 0 on the others."""
    return sum(int((batch.labels_BT >= 0).sum()) for batch in batches) if mesh.is_first_along("tp", "pp") else 0
