"""When each action of a step ran: by the host's clock on a CPU, by events on a CUDA stream.

Nothing waits for anything but at the end, so that what is measured is what runs unmeasured.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from drumline.schedules import Action, Kind, Span, Timeline


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
        rows: of each rank of the pipeline, from measures made behind one barrier, which ranks leave one after another:
            a rank whose inputs seem to come from later is moved by as much.

    Returns:
        The timeline.
    """
    late = _clocks(placement, rows)
    first = min(row[0].start + by for row, by in zip(rows, late, strict=True))
    moved = (
        tuple(Span(span.action, span.start + by - first, span.end + by - first) for span in row)
        for row, by in zip(rows, late, strict=True)
    )
    return Timeline(name, placement, tuple(moved))


def _clocks(placement: Sequence[int], rows: Sequence[tuple[Span, ...]]) -> list[float]:
    """How late each rank left the barrier, at least: what comes to a rank was sent before it was used.

    Source: the condition of clocks of Lamport 1978, "Time, clocks, and the ordering of events", section 3.
    """
    ends = {span.action: span.end for row in rows for span in row}
    late = [0.0] * len(rows)
    for _ in rows:  # a constraint goes through every rank once at most
        for rank, row in enumerate(rows):
            for span in row:
                for sent in _sent_for(span.action):
                    if sent in ends:
                        late[rank] = max(late[rank], ends[sent] + late[placement[sent.stage]] - span.start)
    return late


def _sent_for(action: Action) -> tuple[Action, ...]:
    """What may have made an action's input, on this rank or on another."""
    if action.kind is Kind.FORWARD:
        return (action._replace(stage=action.stage - 1),)
    if action.kind is Kind.WEIGHT:
        return ()
    return tuple(action._replace(stage=action.stage + 1, kind=kind) for kind in (Kind.BACKWARD, Kind.INPUT))
