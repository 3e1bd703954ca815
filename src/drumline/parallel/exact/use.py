"""One use of a weight: where its gradient comes from, and what becomes of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Use:
    """A parameter in one of the places where the model uses it.

    Attributes:
        param: the parameter, as the optimizer has it.
        take: gives the gradient of a micro-batch and forgets it; None: it has none.
        counts: this rank counts the gradient, or would if it held all of it.
        adds: the gradient is added to that of the parameter's first use.
    """

    param: nn.Parameter
    take: Callable[[int], torch.Tensor | None]
    counts: bool = True
    adds: bool = False


def take_grad(param: nn.Parameter) -> torch.Tensor | None:
    """What autograd has accumulated, which it then has no more."""
    grad, param.grad = param.grad, None
    return grad
