"""Durations of a pipeline's actions, from the options of the command line."""

from typing import TYPE_CHECKING

from drumline.recipe.errors import DrumlineError

if TYPE_CHECKING:
    from drumline.schedules import Durations, Schedule


def read_durations(
    schedule: "Schedule",
    forward: str,
    backward: str | None,
    input_gradient: str | None,
    weight_gradient: str | None,
    latency: float,
) -> "Durations":
    """Reads the durations of a schedule's actions.

    Args:
        schedule: the schedule.
        forward: time of a forward, as text: one number, or one for each stage.
        backward: of a whole backward; None: both of its parts, or 2.
        input_gradient: of the backward's part for the input; None: half of it, or what the other part leaves.
        weight_gradient: of the part for the weights; None: the rest.
        latency: from the end of an action to its result's being on another rank.

    Returns:
        The durations.

    Raises:
        DrumlineError: a text is no number, or a part is more than the whole.
    """
    from drumline.schedules import Durations, Kind

    def read(option: str, text: str | None) -> list[float] | None:
        return None if text is None else _times(option, text, schedule)

    whole, first, second = (
        read("--backward", backward), read("--input", input_gradient), read("--weight", weight_gradient)
    )  # fmt: skip
    if whole is None:
        both = None if first is None or second is None else [a + b for a, b in zip(first, second, strict=True)]
        whole = both or _times("--backward", "2", schedule)
    if first is None:
        first = [a / 2 if second is None else a - b for a, b in zip(whole, second or whole, strict=True)]
    if second is None:
        second = [a - b for a, b in zip(whole, first, strict=True)]
    if min(whole) >= 0 and min(*first, *second) < 0:
        raise DrumlineError("--input and --weight are parts of --backward: neither may be negative or more than it")
    forwards = _times("--forward", forward, schedule)
    times = {Kind.FORWARD: forwards, Kind.BACKWARD: whole, Kind.INPUT: first, Kind.WEIGHT: second}
    return Durations(times, latency)


def _times(option: str, text: str, schedule: "Schedule") -> list[float]:
    """Reads one time for all ranks, which a rank's stages share, or one for each stage."""
    try:
        times = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise DrumlineError(f"{option} {text!r} is neither a number nor numbers with commas between") from error
    if len(times) == 1:
        return [times[0] / len(schedule.stages_of(rank)) for rank in schedule.placement]
    if len(times) != schedule.num_stages:
        raise DrumlineError(f"{option} has {len(times)} times, but {schedule.name} has {schedule.num_stages} stages")
    return times
