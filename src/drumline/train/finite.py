"""Stops a run whose loss or gradient is not finite, before the optimizer step, and says where it began."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from drumline.data import Batch
from drumline.parallel import Gradients, to_local
from drumline.recipe.errors import CheckFailed
from drumline.schedules import Action
from drumline.train.setup import Parts
from drumline.train.state import Parameters
from drumline.train.step import Passes


class NonFiniteError(CheckFailed):
    """A loss or a gradient became infinite or not a number; no weight has been changed by this step."""


Place = tuple[int, str]
"""Stage along the model, and the module with the micro-batch."""


class _Where:
    """Knows which micro-batch is on its way through which stage."""

    stage = microbatch = 0

    def begin(self, action: Action) -> None:
        self.stage, self.microbatch = action.stage, action.microbatch

    def end(self) -> None:
        pass


def find_first(
    model: nn.Module, passes: Passes, gradients: Gradients, batches: Sequence[Batch]
) -> tuple[Place | None, Place | None]:
    """Runs forward and backward again and watches every module's output and its gradient.

    The gradients of the step itself are sums over ranks already and cannot say where a value came from. Every rank must
    call this at once: a model that is spread communicates as it goes.

    Args:
        model: the model, or this rank's stages of it.
        passes: that the step takes through it.
        gradients: of the model.
        batches: this rank's micro-batches of the step.

    Returns:
        The first module whose output is not finite, and the first, from the loss backwards, where the gradient of the
        output is not; each None where all are finite. The gradients are garbage afterwards.
    """
    forward: list[Place] = []
    backward: list[Place] = []
    where = _Where()

    def watch(name: str):
        def hook(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, tuple):  # a block with experts also says what its router did
                output = output[0]
            if not isinstance(output, torch.Tensor):
                return
            place = where.stage, f"{name or 'the loss'} (micro-batch {where.microbatch})"
            _note(forward, place, output)
            if output.requires_grad:
                output.register_hook(lambda grad: _note(backward, place, grad))

        return hook

    # A parent's hook runs after its children's, so that the first to speak is the innermost module.
    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        passes.forward_backward(batches, 1, watch=where)
        gradients.finish()
    finally:
        for handle in handles:
            handle.remove()
    return next(iter(forward), None), next(iter(backward), None)


def _note(found: list[Place], place: Place, value: torch.Tensor) -> None:
    if not found and not torch.isfinite(value).all():
        found.append(place)


def find_in_gradients(parameters: Parameters) -> str | None:
    """The parameter nearest to the loss whose gradient is not finite: the backward reached it first."""
    last = None
    for name, param in parameters.items():
        if param.grad is not None and not torch.isfinite(to_local(param.grad)).all():
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
    at_stage = None if parameter is None else (0, parameter)
    found = find_first(parts.model, parts.passes, parts.gradients, batches)
    reports = parts.world.gather_objects((*found, at_stage))
    head = f"step {step}: loss {loss:g}, gradient norm {grad_norm:g}; stopped before the optimizer step"
    for at, what in enumerate(("output of", "gradient of the output of", "gradient, summed over ranks, of")):
        places = [(report[at][0], rank, report[at][1]) for rank, report in enumerate(reports) if report[at]]
        if places:
            # What is not finite spreads along the model, and its gradient back along it.
            _, rank, place = min(places, key=lambda each: (-each[0] if at else each[0], each[1]))
            return f"{head}\n  first not finite on rank {rank}: {what} {place}"
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
