"""A timeline as text for a terminal: a row a rank, time from left to right.

Where there is room an action is written with its text and then dashes for as long as it lasts (`0F3` or, with one
stage a rank, `F3`). Else a column is a slice of time and shows the letter of what ran longest in it: upper case for a
rank's first stage, lower case for its second, and so on in turn. A dot is a rank without work.
"""

from collections.abc import Callable, Iterator

from drumline.schedules.action import Action
from drumline.schedules.simulation import Span, Timeline

IDLE = "."
_SMALLEST = 1e-9  # of a makespan: less is no time
_ROUNDING = 1e-6


def draw_text(timeline: Timeline, width: int, paint: Callable[[Action, str], str] = lambda action, text: text) -> str:
    """Draws a timeline in characters.

    Args:
        timeline: the timeline.
        width: columns of the terminal.
        paint: gives a piece of text the colour of its action.

    Returns:
        A line a rank.
    """
    labels = [f"rank {rank}" for rank in range(len(timeline.spans))]
    margin = max(map(len, labels)) + 2
    columns = max(width - margin, 10)
    begin = min(row[0].start for row in timeline.spans)
    scale = _scale_of_labels(timeline)
    if scale and timeline.makespan * scale <= columns:
        rows = [_labelled(timeline, row, begin, scale, paint) for row in timeline.spans]
    else:
        columns = _even(timeline, begin, columns)
        rows = [_sliced(timeline, row, begin, columns, paint) for row in timeline.spans]
    return "\n".join(f"{label:<{margin}}{text}".rstrip() for label, text in zip(labels, rows, strict=True))


def label(timeline: Timeline, action: Action) -> str:
    """An action's text, without the stage where the rank says it."""
    return str(action) if len(timeline.placement) > len(timeline.spans) else f"{action.kind}{action.microbatch}"


def chunk_of(timeline: Timeline, action: Action) -> int:
    """Which of its rank's stages an action belongs to, from 0."""
    rank = timeline.placement[action.stage]
    return timeline.placement[: action.stage].count(rank)


def _scale_of_labels(timeline: Timeline) -> float:
    """Columns for a unit of time so that every action has room for its text and a gap."""
    spans = [span for row in timeline.spans for span in row]
    if any(span.duration <= _SMALLEST * timeline.makespan for span in spans):
        return 0.0
    return max((len(label(timeline, span.action)) + 1) / span.duration for span in spans)


def _labelled(
    timeline: Timeline, row: tuple[Span, ...], begin: float, scale: float, paint: Callable[[Action, str], str]
) -> str:
    text, column = "", 0
    for span in row:
        start, end = round((span.start - begin) * scale), round((span.end - begin) * scale)
        text += IDLE * max(start - column - 1, 0) + " " * min(max(start - column, 0), 1)
        text += paint(span.action, label(timeline, span.action).ljust(end - start - 1, "-")) + " "
        column = end
    return text + IDLE * (round(timeline.makespan * scale) - column)


def _even(timeline: Timeline, begin: float, columns: int) -> int:
    """Fewer columns, if with them every action takes whole ones."""
    spans = [span for row in timeline.spans for span in row]
    shortest = min((span.duration for span in spans if span.duration > _SMALLEST * timeline.makespan), default=0.0)
    steps = timeline.makespan / shortest
    ends = ((span.end - begin) / shortest for span in spans)
    is_even = steps <= columns and all(abs(end - round(end)) < _ROUNDING for end in (steps, *ends))
    return columns // round(steps) * round(steps) if is_even else columns


def _sliced(
    timeline: Timeline, row: tuple[Span, ...], begin: float, columns: int, paint: Callable[[Action, str], str]
) -> str:
    return "".join(
        paint(action, action.kind if chunk_of(timeline, action) % 2 == 0 else action.kind.lower()) if action else IDLE
        for action in _longest(row, begin, timeline.makespan / columns, columns)
    )


def _longest(row: tuple[Span, ...], begin: float, step: float, columns: int) -> Iterator[Action | None]:
    """What runs longest in each slice of time; None where that is nothing."""
    first = 0
    for column in range(columns):
        left, right = begin + column * step, begin + (column + 1) * step
        while first < len(row) and row[first].end <= left:
            first += 1
        shares: list[tuple[float, Action]] = []
        for span in row[first:]:
            if span.start >= right:
                break
            shares.append((min(span.end, right) - max(span.start, left), span.action))
        idle = step - sum(share for share, _ in shares)
        most = max(shares, default=(0.0, None), key=lambda pair: pair[0])
        yield most[1] if most[0] >= idle else None
