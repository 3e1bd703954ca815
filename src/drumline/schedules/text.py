"""Schedules as CSV, in the form of `torch.distributed.pipelining`: a line a rank, a cell an action.

    0F0,0F1,,0B0,0B1
    1F0,1B0,1F1,1B1

Empty cells, which torch writes for idle steps, and its actions other than computing (`1SEND_F0`, `0UNSHARD`,
`1REDUCE_GRAD`, ...) are left out, as they follow from the others. A pair `(0F4;3B1)OVERLAP_F_B` is read as its two
actions.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from drumline.recipe.errors import DrumlineError
from drumline.schedules.action import Action, parse
from drumline.schedules.schedule import Schedule

_NOT_COMPUTING = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def to_csv(schedule: Schedule) -> str:
    """Writes a schedule as CSV."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.order)


def from_csv(text: str, name: str) -> Schedule:
    """Reads a schedule from CSV.

    Each stage is on the first rank that has an action of it; there are as many micro-batches as are named.

    Args:
        text: the CSV.
        name: of the schedule, for messages.

    Returns:
        The schedule; it may have faults, which `faults` finds.

    Raises:
        DrumlineError: a cell is no action, or stages or micro-batches are not numbered from 0 on.
    """
    order = tuple(
        tuple(action for column, cell in enumerate(line.split(","), 1) for action in _read(cell, name, row, column))
        for row, line in enumerate(text.rstrip().splitlines(), 1)
    )
    empty = [row for row, actions in enumerate(order, 1) if not actions]
    if empty or not order:
        raise DrumlineError(
            f"{name}: line {empty[0] if empty else 1} has no action; each line is a rank, such as 0F0,0F1,0B0,0B1"
        )
    holders: dict[int, int] = {}
    for rank, actions in enumerate(order):
        for action in actions:
            holders.setdefault(action.stage, rank)
    _refuse_gaps(name, "stage", set(holders))
    named = {action.microbatch for actions in order for action in actions}
    _refuse_gaps(name, "micro-batch", named)
    placement = tuple(holders[stage] for stage in range(len(holders)))
    return Schedule(name, len(named), placement, order)


def read_file(path: Path) -> Schedule:
    """Reads a schedule from a CSV file.

    Args:
        path: the file.

    Returns:
        The schedule, named after the file.

    Raises:
        DrumlineError: the file cannot be read, or is no schedule.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise DrumlineError(f"the schedule {path} cannot be read: {reason}") from error
    return from_csv(text, str(path))


def _read(cell: str, name: str, row: int, column: int) -> Iterator[Action]:
    cell = cell.strip()
    pair = _PAIR.fullmatch(cell)
    for part in pair[1].split(";") if pair else [cell]:
        action = parse(part.strip())
        if action:
            yield action
        elif cell and not _NOT_COMPUTING.fullmatch(cell):
            raise DrumlineError(
                f"{name}: line {row}, cell {column} is {cell[:40]!r}, which is no action; "
                "an action is stage, kind (F, B, I or W) and micro-batch, such as 2F0"
            )


def _refuse_gaps(name: str, noun: str, numbers: set[int]) -> None:
    absent = next((number for number in range(len(numbers)) if number not in numbers), None)
    if absent is not None:
        raise DrumlineError(
            f"{name}: has {noun} {max(numbers)} but no action of {noun} {absent}; "
            f"{noun}s are numbered from 0 on without gaps"
        )
