"""What an action waits for, and what happens when ranks run their actions in order, each waiting for its inputs.

    F of a stage   waits for F of the stage before
    B, I           for F of its own stage, and for B or I of the stage after
    W              for I of its own stage

Sends do not block. `run` needs no times: whether ranks get stuck depends on the orders alone, and so does how much
they hold.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from drumline.schedules.action import Action, Kind
from drumline.schedules.schedule import Schedule

Result = Action
"""What an action gives, named by the action that gives it; a whole backward gives I and W."""


@dataclass(frozen=True)
class Run:
    """What became of a schedule.

    Attributes:
        sequence: rank and action in an order in which they can happen, on all ranks.
        waiting: the action at which a rank is stuck, with what it waits for; empty when all ranks finish.
    """

    sequence: tuple[tuple[int, Action], ...]
    waiting: dict[int, tuple[Action, Result]]


def inputs(action: Action, num_stages: int) -> Iterator[Result]:
    """What an action needs.

    Args:
        action: the action.
        num_stages: stages of the model.

    Yields:
        Results: an F, or an I where the gradient of a stage's input is needed.
    """
    stage, kind, microbatch = action
    if kind is Kind.FORWARD:
        if stage > 0:
            yield Action(stage - 1, Kind.FORWARD, microbatch)
    elif kind is Kind.WEIGHT:
        yield Action(stage, Kind.INPUT, microbatch)
    else:
        yield Action(stage, Kind.FORWARD, microbatch)
        if stage < num_stages - 1:
            yield Action(stage + 1, Kind.INPUT, microbatch)


def outputs(action: Action) -> tuple[Result, ...]:
    """What an action gives."""
    if action.kind is Kind.BACKWARD:
        return (action._replace(kind=Kind.INPUT), action._replace(kind=Kind.WEIGHT))
    return (action,)


def run(schedule: Schedule) -> Run:
    """Runs a schedule without times.

    Args:
        schedule: the schedule, sound or not.

    Returns:
        The order in which its actions can happen, and where ranks get stuck.
    """
    done: set[Result] = set()
    position = [0] * schedule.num_ranks
    sequence: list[tuple[int, Action]] = []
    waiting: dict[int, tuple[Action, Result]] = {}
    waiters: dict[Result, list[int]] = defaultdict(list)
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        waiting.pop(rank, None)
        for action in schedule.order[rank][position[rank] :]:
            missing = next((result for result in inputs(action, schedule.num_stages) if result not in done), None)
            if missing:
                waiting[rank] = (action, missing)
                waiters[missing].append(rank)
                break
            position[rank] += 1
            sequence.append((rank, action))
            for result in outputs(action):
                done.add(result)
                ready += waiters.pop(result, ())
    return Run(tuple(sequence), waiting)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most activations that each rank holds at once.

    A stage holds those of a micro-batch from its forward until its backward is done; where the backward is split, until
    the weight gradient, which needs the inputs of the matmuls.

    Args:
        schedule: the schedule.

    Returns:
        For each rank a count of (stage, micro-batch) pairs; a rank with v stages holds 1/v of its layers in each.
    """
    peaks = []
    for actions in schedule.order:
        held = peak = 0
        for action in actions:
            held += {Kind.FORWARD: 1, Kind.INPUT: 0}.get(action.kind, -1)
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
