"""When each action of a step ran: by the host's clock on a CPU, by events on a CUDA stream.

Nothing waits for anything but at the end, so that what is measured is what runs unmeasured.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from drumline.schedules import Action, Span, Timeline


class Watch(Protocol):
    """Is told of each action as it runs."""

    def begin(self, action: Action) -> None:
        """An action starts; its inputs are there."""
        ...

    def end(self) -> None:
        """The action that began last has ended."""
        ...


class Measure:
    """Notes the actions of one rank.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._origin = self._now()
        self._noted: list[list] = []

    def begin(self, action: Action) -> None:
        """An action starts; its inputs are there."""
        self._noted.append([action, self._now()])

    def end(self) -> None:
        """The action that began last has ended."""
        self._noted[-1].append(self._now())

    def spans(self) -> tuple[Span, ...]:
        """The actions with their times in seconds since this object was made."""
        if self._on_cuda:
            torch.cuda.synchronize()
        return tuple(Span(action, self._since(start), self._since(end)) for action, start, end in self._noted)

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, moment: Any) -> float:
        return self._origin.elapsed_time(moment) / 1e3 if self._on_cuda else moment - self._origin


def join(name: str, placement: tuple[int, ...], rows: Sequence[tuple[Span, ...]]) -> Timeline:
    """The measured timeline of a step, which starts at 0.

    Args:
        name: of the schedule.
        placement: the rank of each stage.
        rows: of each rank of the pipeline, from measures made at one moment, behind a barrier.

    Returns:
        The timeline.
    """
    first = min(row[0].start for row in rows)
    moved = (tuple(Span(a, start - first, end - first) for a, start, end in _fields(row)) for row in rows)
    return Timeline(name, placement, tuple(moved))


def _fields(row: tuple[Span, ...]):
    return ((span.action, span.start, span.end) for span in row)
