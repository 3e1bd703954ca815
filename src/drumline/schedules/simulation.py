"""When each action of a schedule runs, given how long actions take: the timeline, its makespan and its bubble.

A rank runs its actions in order. An action starts as soon as the rank is free and its inputs are there; an input from
another rank is there `latency` after the action that gave it ended. Sends cost the sender no time, and links no
contention: what the network adds beyond a latency is not modelled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from drumline.recipe.errors import DrumlineError
from drumline.schedules.action import Action, Kind
from drumline.schedules.checking import check
from drumline.schedules.execution import Result, inputs, outputs, run
from drumline.schedules.schedule import Schedule


@dataclass(frozen=True)
class Durations:
    """How long actions take, in any one unit of time.

    Attributes:
        of: for each kind of action the time on each stage.
        latency: from the end of an action to its result's being on another rank.
    """

    of: Mapping[Kind, Sequence[float]]
    latency: float = 0.0


@dataclass(frozen=True)
class Span:
    """When an action runs.

    Attributes:
        action: the action.
        start: its start.
        end: its end.
    """

    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        """How long it takes."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """When each action of a step runs, simulated or measured.

    Attributes:
        name: of the schedule.
        placement: the rank of each stage.
        spans: for each rank its actions, in order of time.
    """

    name: str
    placement: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """From the first start on any rank to the last end on any."""
        return max(row[-1].end for row in self.spans) - min(row[0].start for row in self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(span.duration for span in row) for row in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time in which they do not compute; the makespan is every rank's time."""
        return 1 - sum(self.busy) / (len(self.spans) * self.makespan)

    @property
    def inner_bubble_fraction(self) -> float:
        """The same between each rank's own first start and last end, of the rank where it is largest.

        This is the bubble where steps follow one another without a barrier (Qi et al. 2024, arXiv:2401.10241,
        section 4), and what "zero bubble" means.
        """
        return max(
            1 - busy / (row[-1].end - row[0].start) if row[-1].end > row[0].start else 0.0
            for busy, row in zip(self.busy, self.spans, strict=True)
        )


def uniform(
    num_stages: int, forward: float, input_gradient: float, weight_gradient: float, latency: float = 0.0
) -> Durations:
    """Durations that are the same on every stage.

    Args:
        num_stages: stages of the model.
        forward: time of F.
        input_gradient: time of I.
        weight_gradient: time of W; B takes that of I and W.
        latency: see `Durations`.

    Returns:
        The durations.
    """
    times = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: input_gradient + weight_gradient,
        Kind.INPUT: input_gradient,
        Kind.WEIGHT: weight_gradient,
    }
    return Durations({kind: (time,) * num_stages for kind, time in times.items()}, latency)


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Finds when each action runs.

    Args:
        schedule: the schedule; it is checked first.
        durations: how long its actions take.

    Returns:
        The timeline, which starts at 0.

    Raises:
        ScheduleError: the schedule has faults.
        DrumlineError: a duration is missing or no number from 0 on, or none is above 0.
    """
    check(schedule)
    _check(durations, schedule)
    timeline = lay_out(schedule, durations)
    if not any(row[-1].end > 0 for row in timeline.spans):
        raise DrumlineError("every action takes no time: there is nothing to simulate; give one a duration above 0")
    return timeline


def lay_out(schedule: Schedule, durations: Durations) -> Timeline:
    """The timeline of a schedule that is known to be sound; one of forwards only may be, too."""
    there: dict[Result, tuple[float, int]] = {}  # when a result is there, and on which rank
    free = [0.0] * schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in schedule.order]
    for rank, action in run(schedule).sequence:
        start = free[rank]
        for needed in inputs(action, schedule.num_stages):
            end, giver = there[needed]
            start = max(start, end if giver == rank else end + durations.latency)
        free[rank] = start + durations.of[action.kind][action.stage]
        spans[rank].append(Span(action, start, free[rank]))
        there.update(dict.fromkeys(outputs(action), (free[rank], rank)))
    return Timeline(schedule.name, schedule.placement, tuple(map(tuple, spans)))


def _check(durations: Durations, schedule: Schedule) -> None:
    for kind in sorted({action.kind for actions in schedule.order for action in actions}):
        if kind not in durations.of:
            raise DrumlineError(f"there are no durations of {kind.name.lower()}, which {schedule.name} has")
    for kind, times in durations.of.items():
        if len(times) != schedule.num_stages:
            raise DrumlineError(
                f"{len(times)} durations of {kind.name.lower()} for {schedule.num_stages} stages: give one for each"
            )
    named = [(f"of {kind.name.lower()}", times) for kind, times in durations.of.items()]
    for name, times in [*named, ("of the latency", (durations.latency,))]:
        if wrong := [time for time in times if not 0 <= time < math.inf]:
            raise DrumlineError(f"a duration {name} is {wrong[0]}, but must be a finite number from 0 on")
