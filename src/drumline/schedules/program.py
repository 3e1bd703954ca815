"""What each rank of a pipeline does, communication included: the list that is executed.

A schedule says only what is computed. The result of an action that another rank needs is sent as soon as it is there,
and received in the same place of one order of all transfers, that in which the simulated schedule makes them. So the
two ends of every pair of ranks name their transfers in one order, whatever lies between, and no rank can wait for
another in a circle: all that comes before a transfer in that order can finish without it. NCCL needs this, as it
matches transfers by their order alone.
"""

from typing import NamedTuple

from drumline.schedules.action import Action, Kind
from drumline.schedules.execution import Result
from drumline.schedules.schedule import Schedule
from drumline.schedules.simulation import lay_out, uniform


class Send(NamedTuple):
    """A result goes to another rank."""

    result: Result
    peer: int


class Receive(NamedTuple):
    """A result comes from another rank."""

    result: Result
    peer: int


Step = Action | Send | Receive


def programs(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Adds the communication to a schedule.

    Args:
        schedule: a sound one, or one of forwards only that is.

    Returns:
        For each rank what it does, in order: its actions in the schedule's order, each send right behind the action
        that gives its result, each receive before the action that needs it and, where the order of transfers allows,
        before the one before that, so that it has time to arrive.
    """
    timeline = lay_out(schedule, uniform(schedule.num_stages, 1.0, 1.0, 1.0))
    ends = sorted((span.end, rank, span.action) for rank, row in enumerate(timeline.spans) for span in row)
    steps: list[list[Step]] = [[] for _ in schedule.order]
    for _, rank, action in ends:
        steps[rank].append(action)
        found = handed_over(action, schedule)
        if found is not None and found[1] != rank:
            result, taker = found
            steps[rank].append(Send(result, taker))
            ahead = _place_of_receive(steps[taker])
            steps[taker].insert(ahead, Receive(result, rank))
    return tuple(map(tuple, steps))


def handed_over(action: Action, schedule: Schedule) -> tuple[Result, int] | None:
    """The result of an action that another stage needs, and the rank of that stage; None where none does."""
    stage, kind, microbatch = action
    if kind is Kind.FORWARD and stage + 1 < schedule.num_stages:
        return action, schedule.placement[stage + 1]
    if kind in (Kind.BACKWARD, Kind.INPUT) and stage > 0:
        return Action(stage, Kind.INPUT, microbatch), schedule.placement[stage - 1]
    return None


def forwards_only(placement: tuple[int, ...], num_microbatches: int) -> Schedule:
    """The schedule of a validation: forwards, each stage of a rank on all micro-batches before the next stage."""
    num_ranks = max(placement) + 1
    order = tuple(
        tuple(
            Action(stage, Kind.FORWARD, microbatch)
            for stage, holder in enumerate(placement)
            if holder == rank
            for microbatch in range(num_microbatches)
        )
        for rank in range(num_ranks)
    )
    return Schedule("forwards", num_microbatches, placement, order)


def _place_of_receive(steps: list[Step]) -> int:
    """Before the rank's last action so far, unless a transfer came after it."""
    return len(steps) - 1 if steps and isinstance(steps[-1], Action) else len(steps)
