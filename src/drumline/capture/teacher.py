"""Teacher forcing: what one capture recorded takes the place of what another run computes, module by module.

Each module then runs on the recorded inputs, and its output's gradient is the recorded one: what it gives is its own
doing, and not passed on from before. With noise, recorded values move by a part of themselves: how far a module's
output then moves is what rounding of its inputs explains.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drumline.capture.keys import GRADIENT, INIT, OPTIMIZER, WEIGHT, key
from drumline.capture.reading import Capture
from drumline.capture.snapshot import MOMENTS, Subject
from drumline.parallel import held


class Teacher:
    """Gives recorded values.

    Args:
        folder: of a capture with elements.
        noise: relative; each element moves by at most so much of itself.
        with_state: weights and moments before the first step are replaced, too.
    """

    def __init__(self, folder: Path, *, noise: float = 0.0, with_state: bool = True):
        self._capture, self._noise, self._with_state = Capture(folder), noise, with_state
        self._newest: tuple[str, torch.Tensor] = ("", torch.empty(0))

    def rows(self, name: str, rows_N: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
        """The recorded rows of an activation or of its gradient.

        Args:
            name: key of it.
            rows_N: int64; None: it is not of tokens.
            like: of the shape, dtype and device that is wanted.

        Returns:
            The value; None where none was recorded.
        """
        if rows_N is None or name not in self._capture:
            return None
        return self._whole(name)[rows_N].to(like).view_as(like)

    @torch.no_grad()
    def give_state(self, subject: Subject, step: int) -> None:
        """Replaces weights, buffers and moments by those before a step, where they were recorded."""
        if not self._with_state:
            return
        for name, param in subject.parameters.items():
            self._copy(subject, name, param, self._before(step, name, WEIGHT))
            for moment in MOMENTS:
                state = subject.optimizer.state.get(param, {})
                if moment in state:
                    self._copy(subject, name, state[moment], self._before(step, f"{name}.{moment}", OPTIMIZER))
        for name, buffer in subject.buffers.items():
            before = self._before(step, name, WEIGHT)
            if before in self._capture:
                buffer.copy_(self._capture.read(before).tensor)

    @torch.no_grad()
    def give_gradients(self, subject: Subject, step: int) -> None:
        """Replaces gradients, summed over ranks and not clipped."""
        for name, param in subject.parameters.items():
            if param.grad is not None:
                self._copy(subject, name, param.grad, key(step, GRADIENT, name))

    def _before(self, step: int, name: str, kind: str) -> str:
        first = key(step - 1, INIT, name)
        return first if first in self._capture else key(step - 1, kind, name)

    def _copy(self, subject: Subject, name: str, tensor: torch.Tensor, wanted: str) -> None:
        if wanted in self._capture:
            part = held(tensor, subject.places[name])
            box = tuple(slice(at, at + n) for at, n in zip(part.offsets, part.tensor.shape, strict=True))
            part.tensor.copy_(self._whole(wanted)[box])

    def _whole(self, name: str) -> torch.Tensor:
        if self._newest[0] != name:
            tensor = self._capture.read(name).tensor
            if self._noise and tensor.is_floating_point():
                random = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # the same on every rank
                turn = torch.rand(tensor.shape, generator=random, dtype=torch.float64) * 2 - 1
                tensor = (tensor.double() * (1 + self._noise * turn)).to(tensor.dtype)
            self._newest = name, tensor
        return self._newest[1]


def replaced(
    output: torch.Tensor, value: torch.Tensor | None, on_gradient: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """An output whose value is another, and whose gradient goes through a function on its way back.

    Args:
        output: of a module.
        value: that takes its place; None: it stays.
        on_gradient: gets the gradient of the output, and gives that which goes on.

    Returns:
        The value, in the graph where the output was.
    """
    return _Replaced.apply(output, output.detach() if value is None else value, on_gradient)  # type: ignore


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output, value, on_gradient):
        ctx.on_gradient = on_gradient
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs):
        return ctx.on_gradient(grad_outputs[0]), None, None
