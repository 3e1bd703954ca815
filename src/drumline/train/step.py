"""One optimizer step, to be read from top to bottom."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from drumline.comm import World
from drumline.data import Batch
from drumline.models import Routed
from drumline.optimizers import clip, local_sum_of_squares
from drumline.parallel import Gradients, Mesh, free_gathered


@dataclass(frozen=True)
class StepResult:
    """What one step gives: the mean loss over the global batch's valid tokens, the global gradient norm before
    clipping.
    """

    loss: float
    grad_norm: float


def train_step(
    batches: Sequence[Batch],
    num_tokens: int,
    lr: float,
    *,
    model: nn.Module,
    gradients: Gradients,
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float,
    reduce_scalars: Callable[[torch.Tensor, torch.Tensor], tuple[float, float]],
    check_finite: Callable[[StepResult, Sequence[Batch]], None],
    on_routed: Callable[[int, Routed], None] | None = None,
) -> StepResult:
    """Trains on this rank's micro-batches of one global batch.

    Args:
        batches: the micro-batches, each [B, T], on the model's device.
        num_tokens: valid tokens of the *global* batch: the loss is normalized by it, so that uneven micro-batches
            weigh right.
        lr: learning rate of this step.
        model: gives the sum of the cross-entropy over valid tokens.
        gradients: brings the gradients to their sum over the data-parallel ranks.
        optimizer: steps on the clipped gradients.
        max_grad_norm: clip to this; 0: never.
        reduce_scalars: this rank's loss and sum of squared gradients -> the global loss and the global sum of squares.
        check_finite: raises where the result is not finite, before any weight has moved.
        on_routed: is told what each layer's router did; None: the model is dense.

    Returns:
        Loss and gradient norm.
    """
    gradients.zero_grad()
    loss = forward_backward(model, batches, num_tokens, gradients, on_routed)
    loss_sum, square_sum = reduce_scalars(loss, local_sum_of_squares(gradients.local()))
    result = StepResult(loss_sum, square_sum**0.5)
    # Reading the two scalars here makes the host wait once a step: weights must not move on a result that is not
    # finite.
    check_finite(result, batches)
    clip(gradients.local(), result.grad_norm, max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return result


def forward_backward(
    model: nn.Module,
    batches: Sequence[Batch],
    num_tokens: int,
    gradients: Gradients,
    on_routed: Callable[[int, Routed], None] | None = None,
) -> torch.Tensor:
    """Accumulates the gradients of all micro-batches.

    Args:
        model: gives the sum of the cross-entropy.
        batches: this rank's micro-batches, each [B, T].
        num_tokens: valid tokens of the global batch.
        gradients: told which backward is the step's last.
        on_routed: is told what each layer's router did.

    Returns:
        This rank's share of the loss, fp32 scalar on the device.
    """
    total = torch.zeros((), device=batches[0].tokens_BT.device)
    options = {} if on_routed is None else {"on_routed": on_routed}
    for index, batch in enumerate(batches):
        gradients.set_sync(index == len(batches) - 1)
        loss = model(batch.tokens_BT, starts_BT=batch.starts_BT, labels_BT=batch.labels_BT, **options)
        loss = loss / max(1, num_tokens)
        loss.backward()
        total += loss.detach()
    gradients.finish()
    return total


def make_reduce_scalars(world: World, mesh: Mesh) -> Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]:
    """Makes the function that joins the ranks' losses and squared gradients.

    Every rank's loss is its own share. A sum of squares is a share only where parameters are sharded, along fsdp and
    the cp that goes with it: replicas along dp hold the same gradients, so that adding over all ranks counts each dp
    times; dividing by a whole number that is the same everywhere keeps ranks equal.
    """

    def reduce(loss: torch.Tensor, squares: torch.Tensor) -> tuple[float, float]:
        copies = mesh.layout.dp
        if mesh.layout.fsdp == 1:  # gradients are whole on each rank already: no division, no rounding
            return float(world.sum(loss.double().reshape(1))[0]), float(squares)
        both = world.sum(torch.stack([loss.double(), squares.double()])).tolist()
        return both[0], both[1] / copies

    return reduce


@torch.no_grad()
def validate(model: nn.Module, steps: Sequence[Sequence[Batch]], world: World) -> tuple[float, int]:
    """The mean loss over held-out batches.

    Args:
        model: gives the sum of the cross-entropy.
        steps: this rank's micro-batches of each validation batch; the same number on every rank.
        world: over which losses and counts are summed.

    Returns:
        Loss a token and the number of valid tokens, both over all ranks.
    """
    loss_sum, num_tokens = 0.0, 0
    for batches in steps:
        for batch in batches:
            loss_sum += float(model(batch.tokens_BT, starts_BT=batch.starts_BT, labels_BT=batch.labels_BT))
            num_tokens += count_valid(batch)
    free_gathered(model)
    total, count = world.sum([loss_sum, num_tokens]).tolist()
    return total / max(1.0, count), int(count)


def count_valid(batch: Batch) -> int:
    """Tokens of a micro-batch whose label counts."""
    return int((batch.labels_BT >= 0).sum())
