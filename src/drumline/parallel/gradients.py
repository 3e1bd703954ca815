"""What the training step may ask of gradients, whatever way they are spread; and the simplest way, one rank alone."""

from collections.abc import Iterable
from typing import Protocol, cast

import torch
from torch import nn


class Gradients(Protocol):
    """How gradients reach their sum over the data-parallel ranks."""

    def set_sync(self, sync: bool) -> None:
        """Whether the coming backward is the last of its step; earlier ones only accumulate."""
        ...

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        ...

    def finish(self) -> None:
        """Returns when every gradient holds its sum."""
        ...

    def local(self) -> list[torch.Tensor]:
        """This rank's gradients, to read or to scale in place; each element once."""
        ...


class Alone:
    """One rank: gradients are whole as they are."""

    def __init__(self, model: nn.Module):
        self._params = [p for p in model.parameters() if p.requires_grad]

    def set_sync(self, sync: bool) -> None:
        """Nothing to synchronize."""

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for param in self._params:
            param.grad = None

    def finish(self) -> None:
        """Nothing to wait for."""

    def local(self) -> list[torch.Tensor]:
        """Every gradient."""
        return [p.grad for p in self._params if p.grad is not None]


def layers_of(model: nn.Module) -> Iterable[nn.Module]:
    """The blocks of a decoder, in the order of the forward."""
    return cast(Iterable[nn.Module], model.layers)
