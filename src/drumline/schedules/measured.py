"""A measured timeline as a file, and what the simulation makes of its durations.

The file is JSON: the schedule's name, the rank of each stage, and for each rank its actions with start and end in
seconds. What a rank waits for is between its actions; so the simulation, given the mean duration of each kind of action
on each stage, shows the step as it would have been without jitter and with a network that takes no time.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from drumline.recipe.errors import DrumlineError
from drumline.schedules.action import Kind, parse
from drumline.schedules.schedule import Schedule
from drumline.schedules.simulation import Durations, Span, Timeline


def timeline_to_json(timeline: Timeline) -> str:
    """Writes a timeline as JSON."""
    spans = [[[str(span.action), span.start, span.end] for span in row] for row in timeline.spans]
    return json.dumps({"schedule": timeline.name, "placement": timeline.placement, "unit": "s", "spans": spans}) + "\n"


def read_timeline(path: Path) -> Timeline:
    """Reads a timeline that a run wrote.

    Args:
        path: the file.

    Returns:
        The timeline.

    Raises:
        DrumlineError: the file cannot be read, or holds no timeline.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DrumlineError(f"the timeline {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DrumlineError(f"{path} is no timeline: it is not JSON") from error
    try:
        rows = tuple(tuple(_read_span(*each) for each in row) for row in body["spans"])
        placement = tuple(int(rank) for rank in body["placement"])
        name = str(body["schedule"])
    except (KeyError, TypeError, ValueError) as error:
        raise DrumlineError(f"{path} is no timeline that a run wrote with run.timeline: {error}") from error
    if not rows or not all(rows) or not placement or not set(placement) <= set(range(len(rows))):
        raise DrumlineError(f"{path} is no timeline: a rank has no action, or a stage no rank")
    return Timeline(name, placement, rows)


def schedule_of(timeline: Timeline) -> Schedule:
    """The schedule whose actions a timeline shows."""
    order = tuple(tuple(span.action for span in row) for row in timeline.spans)
    num_microbatches = 1 + max(action.microbatch for row in order for action in row)
    return Schedule(timeline.name, num_microbatches, timeline.placement, order)


def mean_durations(timeline: Timeline) -> Durations:
    """How long each kind of action takes on each stage, on average; 0 where there is none."""
    found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for row in timeline.spans:
        for span in row:
            found[span.action.kind, span.action.stage].append(span.duration)
    stages = range(len(timeline.placement))
    return Durations(
        {
            kind: tuple(sum(found[kind, stage]) / max(1, len(found[kind, stage])) for stage in stages)
            for kind in sorted({kind for kind, _ in found})
        }
    )


def _read_span(text: Any, start: Any, end: Any) -> Span:
    action = parse(text)
    if action is None:
        raise ValueError(f"{text!r} is no action")
    span = Span(action, float(start), float(end))
    if not span.end >= span.start:
        raise ValueError(f"{text} ends before it starts")
    return span
