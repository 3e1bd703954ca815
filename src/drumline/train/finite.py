"""Stops a run whose loss or gradient is not finite, before the optimizer step, and says where it began."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drumline.data import Batch
from drumline.recipe.errors import CheckFailed
from drumline.train.setup import Parts
from drumline.train.state import Parameters


class NonFiniteError(CheckFailed):
    """A loss or a gradient became infinite or not a number; no weight has been changed by this step."""


def find_in_forward(model: nn.Module, batches: Sequence[Batch]) -> str | None:
    """Runs the forward again and names the first module whose output is not finite.

    Every rank must call this at once: a sharded model gathers parameters as it goes.

    Returns:
        The module's logical name and the batch, or None where every output is finite.
    """
    found: list[str] = []
    index = 0

    def watch(name: str):
        def hook(module: nn.Module, args: object, output: object) -> None:
            if not found and isinstance(output, torch.Tensor) and not torch.isfinite(output).all():
                found.append(f"{name or 'the loss'} (micro-batch {index})")

        return hook

    # A parent's hook runs after its children's, so that the first to speak is the innermost module.
    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            for index, batch in enumerate(batches):  # noqa: B007 (the hooks read it)
                model(batch.tokens_BT, starts_BT=batch.starts_BT, labels_BT=batch.labels_BT)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


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

    Returns:
        One message, the same on every rank.
    """
    where = find_in_forward(parts.model, batches)
    reports = parts.world.gather_objects((where, find_in_gradients(parts.parameters)))
    head = f"step {step}: loss {loss:g}, gradient norm {grad_norm:g}; stopped before the optimizer step"
    for rank, (module, _) in enumerate(reports):
        if module is not None:
            return f"{head}\n  first in the forward of rank {rank}: {module}"
    for rank, (_, parameter) in enumerate(reports):
        if parameter is not None:
            return f"{head}\n  first in the backward of rank {rank}: gradient of {parameter}"
    return f"{head}\n  every module's output and every gradient is finite by itself: the sum of squares overflowed"


def check(step: int, loss: float, grad_norm: float, *, parts: Parts, batches: Sequence[Batch]) -> None:
    """Raises where loss or gradient norm is not finite; both are the same on every rank, so all ranks raise together.

    Raises:
        NonFiniteError: names the step, the rank and the first module.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    raise NonFiniteError(explain(step, loss, grad_norm, parts, batches))
