"""The schedules by name."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from drumline.recipe.errors import DrumlineError
from drumline.recipe.layout import FEWEST_STAGES, SCHEDULE_STAGES
from drumline.schedules.fill_drain import gpipe
from drumline.schedules.one_forward_one_backward import (
    interleaved,
    interleaved_zero_bubble,
    one_forward_one_backward,
    zero_bubble_h1,
)
from drumline.schedules.schedule import Schedule
from drumline.schedules.v_shape import dualpipev, zbv

MAX_FORWARDS = 1_000_000  # of all ranks in a step; a schedule above is a typing error


@dataclass(frozen=True)
class Entry:
    """A kind of schedule.

    Attributes:
        generate: makes it from ranks, micro-batches and stages a rank.
        virtual: the stages a rank it has; None where one may choose.
    """

    generate: Callable[[int, int, int], Schedule]
    virtual: int | None = None


_GENERATORS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda p, m, _: gpipe(p, m),
    "1f1b": lambda p, m, _: one_forward_one_backward(p, m),
    "interleaved-1f1b": interleaved,
    "zb-h1": lambda p, m, _: zero_bubble_h1(p, m),
    "interleaved-zero-bubble": interleaved_zero_bubble,
    "zbv": lambda p, m, _: zbv(p, m),
    "dualpipev": lambda p, m, _: dualpipev(p, m),
}
SCHEDULES = {name: Entry(_GENERATORS[name], virtual) for name, virtual in SCHEDULE_STAGES.items()}


def generate(name: str, num_ranks: int, num_microbatches: int, virtual: int | None = None) -> Schedule:
    """Generates a schedule by its name.

    Args:
        name: a key of `SCHEDULES`.
        num_ranks: the pipeline-parallel degree.
        num_microbatches: micro-batches of a step; every schedule takes any number.
        virtual: stages on each rank; by default what the schedule needs, or 2 where one may choose.

    Returns:
        The schedule.

    Raises:
        DrumlineError: there is no such schedule, or it does not exist with these numbers.
    """
    entry = SCHEDULES.get(name)
    if entry is None:
        close = get_close_matches(name.lower(), SCHEDULES, 1, 0.4)
        hint = f"did you mean {close[0]}? " if close else ""
        raise DrumlineError(f"there is no schedule {name!r}; {hint}There are {', '.join(SCHEDULES)}")
    for value, noun in ((num_ranks, "the pipeline degree"), (num_microbatches, "the number of micro-batches")):
        if value < 1:
            raise DrumlineError(f"{noun} is {value}, but must be at least 1")
    if virtual is not None:
        _check_virtual(name, entry, virtual)
    stages = virtual or entry.virtual or FEWEST_STAGES
    if (count := num_ranks * stages * num_microbatches) > MAX_FORWARDS:
        raise DrumlineError(
            f"{num_ranks:,} ranks of {stages:,} stages and {num_microbatches:,} micro-batches make {count:,} forwards; "
            f"at most {MAX_FORWARDS:,} are supported"
        )
    return entry.generate(num_ranks, num_microbatches, stages)


def _check_virtual(name: str, entry: Entry, virtual: int) -> None:
    if entry.virtual is not None and virtual != entry.virtual:
        alternatives = [other for other, found in SCHEDULES.items() if found.virtual in (None, virtual)]
        stages = "1 stage" if entry.virtual == 1 else f"{entry.virtual} stages"
        raise DrumlineError(
            f"{name} has {stages} a rank, not {virtual}; with {virtual} there are {', '.join(alternatives)}"
            if virtual > 0
            else f"{name} has {stages} a rank, not {virtual}"
        )
    if entry.virtual is None and virtual < 2:
        plain = "1f1b" if name == "interleaved-1f1b" else "zb-h1"
        raise DrumlineError(
            f"{name} needs at least 2 stages a rank, not {virtual}; {plain} is the schedule with 1 stage a rank"
        )
