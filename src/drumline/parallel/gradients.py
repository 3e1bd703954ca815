"""What the training step may ask of gradients, whatever way they are spread; and the simplest way, one rank alone."""

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import torch
from torch import nn


class Gradients(Protocol):
    """How gradients reach their sum over the ranks that each computed a share."""

    def set_sync(self, sync: bool) -> None:
        """Whether the coming backward is the last of its step; earlier ones only accumulate."""
        ...

    def begin(self, microbatch: int) -> None:
        """The backward of a micro-batch comes, or a part of it."""
        ...

    def end(self, microbatch: int) -> None:
        """The backward of a micro-batch has been through all of the parameters; what keeps micro-batches apart takes
        its gradients now.
        """
        ...

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        ...

    def finish(self) -> None:
        """Returns when every gradient holds its sum."""
        ...

    def local(self) -> list[torch.Tensor]:
        """This rank's gradients, to scale in place; each element once."""
        ...

    def counted(self) -> list[torch.Tensor]:
        """Those of them that this rank counts: over all ranks together each element of the model is counted once."""
        ...


class Alone:
    """Gradients that are whole as they are.

    Args:
        params: the parameters.
        counts: whether this rank is the one that counts them.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, counts: bool = True):
        self._params = [p for p in params if p.requires_grad]
        self._counts = counts

    def set_sync(self, sync: bool) -> None:
        """Nothing to synchronize."""

    def begin(self, microbatch: int) -> None:
        """Micro-batches are not kept apart."""

    def end(self, microbatch: int) -> None:
        """Autograd has accumulated them."""

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for param in self._params:
            param.grad = None

    def finish(self) -> None:
        """Nothing to wait for."""

    def local(self) -> list[torch.Tensor]:
        """Every gradient."""
        return [p.grad for p in self._params if p.grad is not None]

    def counted(self) -> list[torch.Tensor]:
        """Every gradient, or none."""
        return self.local() if self._counts else []


class Several:
    """Gradients of which each part goes its own way.

    Args:
        parts: the ways.
    """

    def __init__(self, parts: Sequence[Gradients]):
        self._parts = parts

    def set_sync(self, sync: bool) -> None:
        """As `Gradients`."""
        for part in self._parts:
            part.set_sync(sync)

    def begin(self, microbatch: int) -> None:
        """As `Gradients`."""
        for part in self._parts:
            part.begin(microbatch)

    def end(self, microbatch: int) -> None:
        """As `Gradients`."""
        for part in self._parts:
            part.end(microbatch)

    def zero_grad(self) -> None:
        """As `Gradients`."""
        for part in self._parts:
            part.zero_grad()

    def finish(self) -> None:
        """As `Gradients`."""
        for part in self._parts:
            part.finish()

    def local(self) -> list[torch.Tensor]:
        """As `Gradients`."""
        return [grad for part in self._parts for grad in part.local()]

    def counted(self) -> list[torch.Tensor]:
        """As `Gradients`."""
        return [grad for part in self._parts for grad in part.counted()]


def layers_of(model: nn.Module) -> Iterable[nn.Module]:
    """The blocks of a decoder, in the order of the forward; modules of multi-token prediction come last."""
    return (*cast(Iterable[nn.Module], model.layers), *cast(Iterable[nn.Module], getattr(model, "mtp", ())))
