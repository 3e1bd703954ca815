"""Checks a schedule: every action exactly once and on its stage's rank, in an order that no rank gets stuck in.

A fault names the rank and the action, so that a hand-written schedule can be mended.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from drumline.recipe.errors import CheckFailed
from drumline.schedules.action import Action, Kind
from drumline.schedules.execution import Result, Run, inputs, outputs, run
from drumline.schedules.schedule import Schedule


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a schedule.

    Attributes:
        code: what kind of fault: `missing`, `duplicate`, `two-backwards`, `unknown`, `wrong-rank`, `empty`,
            `too-early` or `deadlock`.
        message: the fault as a sentence, with rank and action.
    """

    code: str
    message: str

    def __str__(self) -> str:
        """The fault as a line."""
        return f"{self.message}   [{self.code}]"


class ScheduleError(CheckFailed):
    """A schedule has faults; carries all that were found.

    Args:
        name: of the schedule.
        faults: what is wrong, at least one.
    """

    MOST_SHOWN = 20

    def __init__(self, name: str, faults: tuple[Fault, ...]):
        self.faults = faults
        count = "a fault" if len(faults) == 1 else f"{len(faults)} faults"
        lines = [f"schedule {name} has {count}:", *map(str, faults[: self.MOST_SHOWN])]
        rest = len(faults) - self.MOST_SHOWN
        super().__init__("\n".join([*lines, f"... and {rest} more"] if rest > 0 else lines))


def faults(schedule: Schedule) -> tuple[Fault, ...]:
    """Finds what is wrong with a schedule.

    Args:
        schedule: the schedule.

    Returns:
        Every fault; a deadlock only where there is no other, as most others cause one. Empty when sound.
    """
    rules = (_unknown, _counts, _misplaced, _empty, _too_early)
    found = tuple(fault for rule in rules for fault in rule(schedule))
    if found:
        return found
    ended = run(schedule)
    return (_deadlock(schedule, ended),) if ended.waiting else ()


def check(schedule: Schedule) -> None:
    """Refuses a schedule that has faults.

    Args:
        schedule: the schedule.

    Raises:
        ScheduleError: it has some.
    """
    if found := faults(schedule):
        raise ScheduleError(schedule.name, found)


def _is_known(schedule: Schedule, action: Action) -> bool:
    return 0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.num_microbatches


def _unknown(schedule: Schedule) -> Iterator[Fault]:
    for rank, actions in enumerate(schedule.order):
        for action in actions:
            if not _is_known(schedule, action):
                yield Fault(
                    "unknown",
                    f"rank {rank} has {action}, but there are {schedule.num_stages} stages and "
                    f"{schedule.num_microbatches} micro-batches",
                )


def _counts(schedule: Schedule) -> Iterator[Fault]:
    found: dict[Action, list[int]] = defaultdict(list)
    for rank, actions in enumerate(schedule.order):
        for action in actions:
            found[action].append(rank)
    for action, ranks in found.items():
        if len(ranks) > 1:
            yield Fault("duplicate", f"{action} is there {len(ranks)} times, on {_ranks(ranks)}")
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.num_microbatches):
            forward, whole, gradient, weight = (
                Action(stage, kind, microbatch) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
            )
            if forward not in found:
                yield Fault("missing", f"{forward} is missing on rank {rank}")
            parts = [action for action in (gradient, weight) if action in found]
            if whole in found and parts:
                yield Fault(
                    "two-backwards",
                    f"stage {stage} has both a whole backward {whole} and a part of it, {parts[0]}, "
                    f"on micro-batch {microbatch}",
                )
            elif whole not in found and not parts:
                yield Fault("missing", f"{whole} (or {gradient} and {weight}) is missing on rank {rank}")
            elif len(parts) == 1:
                absent = weight if parts == [gradient] else gradient
                yield Fault("missing", f"{absent} is missing on rank {rank}, which has {parts[0]}")


def _misplaced(schedule: Schedule) -> Iterator[Fault]:
    for rank, actions in enumerate(schedule.order):
        for action in actions:
            if _is_known(schedule, action) and (home := schedule.placement[action.stage]) != rank:
                yield Fault("wrong-rank", f"rank {rank} has {action}, but stage {action.stage} is on rank {home}")


def _empty(schedule: Schedule) -> Iterator[Fault]:
    for rank, actions in enumerate(schedule.order):
        if not actions:
            yield Fault("empty", f"rank {rank} has no action")


def _too_early(schedule: Schedule) -> Iterator[Fault]:
    """Actions before one of the same rank that they wait for: a deadlock of a rank with itself."""
    for rank, actions in enumerate(schedule.order):
        later: dict[Result, Action] = {result: action for action in actions for result in outputs(action)}
        for action in actions:
            for result in outputs(action):
                later.pop(result, None)
            for needed in inputs(action, schedule.num_stages):
                if needed in later:
                    yield Fault("too-early", f"rank {rank} has {action} before {later[needed]}, which it waits for")


def _deadlock(schedule: Schedule, ended: Run) -> Fault:
    givers = {
        result: (rank, action)
        for rank, actions in enumerate(schedule.order)
        for action in actions
        for result in outputs(action)
    }
    rank, path = next(iter(ended.waiting)), []
    while rank not in path:  # each stuck rank waits for another stuck one, so the way ends in a circle
        path.append(rank)
        rank = givers[ended.waiting[rank][1]][0]
    circle = path[path.index(rank) :]
    waits = "; ".join(
        f"rank {member} at {ended.waiting[member][0]} waits for {giver} of rank {other}"
        for member in sorted(circle)
        for other, giver in (givers[ended.waiting[member][1]],)
    )
    return Fault("deadlock", f"{_ranks(list(ended.waiting))} cannot go on: {waits}")


def _ranks(ranks: list[int]) -> str:
    unique = sorted(set(ranks))
    return f"rank{'s' if len(unique) > 1 else ''} {', '.join(map(str, unique))}"
