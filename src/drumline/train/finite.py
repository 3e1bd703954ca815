"""Stops a run whose loss or gradient is not finite, before the optimizer step, and says where it began."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drumline.data import Batch
from drumline.parallel import Gradients
from drumline.recipe.errors import CheckFailed
from drumline.train.setup import Parts
from drumline.train.state import Parameters


class NonFiniteError(CheckFailed):
    """A loss or a gradient became infinite or not a number; no weight has been changed by this step."""


def find_first(model: nn.Module, gradients: Gradients, batches: Sequence[Batch]) -> tuple[str | None, str | None]:
    """Runs forward and backward again and watches every module's output and its gradient.

    The gradients of the step itself are sums over ranks already and cannot say where a value came from. Every rank must
    call this at once: a sharded model communicates as it goes.

    Args:
        model: the model.
        gradients: of the model; they are run as in a step.
        batches: this rank's micro-batches of the step.

    Returns:
        The first module whose output is not finite, and the first, from the loss backwards, where the gradient of the
        output is not; each None where all are finite. The gradients are garbage afterwards.
    """
    forward: list[str] = []
    backward: list[str] = []
    index = 0

    def watch(name: str):
        def hook(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, tuple):  # a block with experts also says what its router did
                output = output[0]
            if not isinstance(output, torch.Tensor):
                return
            place = f"{name or 'the loss'} (micro-batch {index})"
            _note(forward, place, output)
            if output.requires_grad:
                output.register_hook(lambda grad: _note(backward, place, grad))

        return hook

    # A parent's hook runs after its children's, so that the first to speak is the innermost module.
    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        gradients.set_sync(False)
        for index, batch in enumerate(batches):  # noqa: B007 (the hooks read it)
            model(batch.tokens_BT, starts_BT=batch.starts_BT, labels_BT=batch.labels_BT).backward()
    finally:
        for handle in handles:
            handle.remove()
    return next(iter(forward), None), next(iter(backward), None)


def _note(found: list[str], place: str, value: torch.Tensor) -> None:
    if not found and not torch.isfinite(value).all():
        found.append(place)


def find_in_gradients(parameters: Parameters) -> str | None:
    """The parameter nearest to the loss whose gradient is not finite: the backward reached it first."""
    last = None
    for name, param in parameters.items():
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        if grad is not None and not torch.isfinite(grad).all():
            last = name
    return last


def explain(step: int, loss: float, grad_norm: float, parts: Parts, batches: Sequence[Batch]) -> str:
    """Finds out, on all ranks together, on which rank and in which module a step first lost finiteness.

    Args:
        step: 1-based number of the step.
        loss: over the global batch.
        grad_norm: of all gradients, before clipping.
        parts: of the run.
        batches: this rank's micro-batches of the step.

    Returns:
        One message, the same on every rank.
    """
    parameter = find_in_gradients(parts.parameters)
    reports = parts.world.gather_objects((*find_first(parts.model, parts.gradients, batches), parameter))
    head = f"step {step}: loss {loss:g}, gradient norm {grad_norm:g}; stopped before the optimizer step"
    for at, what in enumerate(("output of", "gradient of the output of", "gradient, summed over ranks, of")):
        for rank, report in enumerate(reports):
            if report[at] is not None:
                return f"{head}\n  first not finite on rank {rank}: {what} {report[at]}"
    return f"{head}\n  every module's output and every gradient is finite by itself: the sum of squares overflowed"


def check(step: int, loss: float, grad_norm: float, *, parts: Parts, batches: Sequence[Batch]) -> None:
    """Raises where loss or gradient norm is not finite; both are the same on every rank, so all ranks raise together.

    Args:
        step: 1-based number of the step.
        loss: over the global batch.
        grad_norm: of all gradients, before clipping.
        parts: of the run.
        batches: this rank's micro-batches of the step.

    Raises:
        NonFiniteError: names the step, the rank and the first module.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    raise NonFiniteError(explain(step, loss, grad_norm, parts, batches))
