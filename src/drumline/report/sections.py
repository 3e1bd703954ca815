"""The parts of the page around the charts: the head with its figures, and the panels below."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from drumline.recipe.canonical import flat
from drumline.recipe.layout import AXES
from drumline.recipe.problem import show
from drumline.report.html import Html, element, fragment, table
from drumline.report.run import Event, Run
from drumline.report.summary import Summary
from drumline.report.units import (
    ABSENT,
    show_bytes,
    show_count,
    show_duration,
    show_number,
    show_percent,
    show_time,
)

MAX_EVENTS = 200
STATUS = {
    "done": "done",
    "preempted": "stopped, can go on",
    "failed": "failed",
    "unfinished": "no end recorded: it runs still, or was killed",
    "empty": "no steps yet",
}
SPLITS = {
    "pp": "pipeline: stages of layers",
    "dp": "data: whole replicas",
    "fsdp": "data: replicas that share parameters (ZeRO)",
    "cp": "context: parts of each sequence",
    "tp": "tensor: parts of each matmul",
    "ep": "experts, on ranks of fsdp x cp",
}


def head(runs: Sequence[Run], summaries: Sequence[Summary]) -> Html:
    """The page's head: names, states and figures.

    Args:
        runs: what is shown.
        summaries: of each run.

    Returns:
        HTML.
    """
    names = [
        element(
            "div",
            element("span", "", class_="swatch", data_run=str(index)) if len(runs) > 1 else "",
            element("h1", run.name),
            element("span", STATUS[summary.status], class_=f"status {summary.status}"),
            element("span", str(run.folder), class_="folder"),
            class_="run",
        )
        for index, (run, summary) in enumerate(zip(runs, summaries, strict=True))
    ]
    prefix = (lambda run: f"{run.name}: ") if len(runs) > 1 else (lambda run: "")
    notes = [prefix(run) + note for run in runs for note in run.notes]
    damaged = [
        f"{prefix(run)}{checkpoint.name} is not whole, see Checkpoints"
        for run in runs
        for checkpoint in run.checkpoints
        if not checkpoint.is_whole
    ]
    warnings = (
        element("ul", *(element("li", note) for note in notes + damaged), class_="notes") if notes + damaged else ""
    )
    figures = _tiles(summaries[0]) if len(runs) == 1 else _comparison(runs, summaries)
    return element("header", element("button", "theme", id="theme", type="button"), *names, figures, warnings)


def panels(runs: Sequence[Run], summaries: Sequence[Summary]) -> Html:
    """Everything below the head.

    Args:
        runs: what is shown.
        summaries: of each run.

    Returns:
        HTML.
    """
    parts: list[Html] = []
    if any(len(run.step) for run in runs):
        parts.append(_controls())
        parts.append(element("div", "", id="charts"))
    else:
        parts.append(element("p", "No step has been recorded, so there are no curves yet.", class_="empty"))
    if len(runs) > 1:
        parts.append(_differences(runs))
    for run, summary in zip(runs, summaries, strict=True):
        suffix = f" of {run.name}" if len(runs) > 1 else ""
        parts.append(_panel(f"Checkpoints{suffix}", _checkpoints(run), is_open=len(runs) == 1))
        parts.append(_panel(f"Events{suffix}", _events(run), is_open=len(runs) == 1))
        parts.append(_panel(f"Layout{suffix}", _layout(run, summary), is_open=len(runs) == 1))
        parts.append(_panel(f"Recipe{suffix}", _recipe(run)))
        parts.append(_panel(f"Environment{suffix}", _environment(run)))
    return fragment(*parts)


def _figures(summary: Summary) -> list[tuple[str, str, str]]:
    """Label, value and a small line below it."""
    planned = f"of {summary.planned_steps:,}" if summary.planned_steps is not None else ""
    ranks = f"on {summary.world} rank{'s' if summary.world != 1 else ''}" if summary.world else ""
    drop = f"from {show_number(summary.first_validation_loss)}, {show_percent(summary.validation_drop)} less"
    has_drop = summary.validation_drop == summary.validation_drop
    resumed = (
        f", resumed {summary.num_resumes} time{'s' if summary.num_resumes > 1 else ''}" if summary.num_resumes else ""
    )
    return [
        ("Steps", f"{summary.num_steps:,}", planned + resumed),
        ("Training loss", show_number(summary.last_loss), f"from {show_number(summary.first_loss)}"),
        ("Validation loss", show_number(summary.last_validation_loss), drop if has_drop else ""),
        ("Tokens", show_count(summary.num_tokens), "trained on"),
        ("Throughput", f"{show_count(summary.tokens_per_s)}/s", "tokens, median"),
        ("MFU", show_percent(summary.mfu), "median"),
        ("Peak memory", show_bytes(summary.peak_memory_bytes), "of rank 0"),
        ("Time in steps", show_duration(summary.train_s), f"+ {show_duration(summary.stall_s)} for commits"),
        ("Layout", summary.layout or ABSENT, ranks),
        ("Checkpoints", str(summary.num_checkpoints), show_bytes(summary.checkpoint_bytes)),
    ]


def _tiles(summary: Summary) -> Html:
    return element(
        "dl",
        *(
            element("div", element("dt", label), element("dd", value), element("dd", below, class_="below"))
            for label, value, below in _figures(summary)
        ),
        class_="tiles",
    )


def _comparison(runs: Sequence[Run], summaries: Sequence[Summary]) -> Html:
    columns = [_figures(summary) for summary in summaries]
    rows = [
        [label, *(fragment(column[row][1], " ", element("small", column[row][2])) for column in columns)]
        for row, (label, _, _) in enumerate(columns[0])
    ]
    return table(["", *(run.name for run in runs)], rows, "comparison")


def _controls() -> Html:
    def choice(name: str, options: dict[str, str]) -> Html:
        buttons = [
            element("button", label, type="button", data_value=value, aria_pressed="true" if index == 0 else "false")
            for index, (value, label) in enumerate(options.items())
        ]
        return element("div", element("span", name), *buttons, class_="choice", id=name.lower(), role="group")

    return element(
        "nav",
        choice("Over", {"step": "steps", "tokens": "tokens", "hours": "hours"}),
        choice("Losses", {"linear": "linear", "log": "logarithmic"}),
        class_="controls",
    )


def _panel(title: str, content: Html, *, is_open: bool = False) -> Html:
    inner = fragment(element("summary", title), content)
    return Html(f'<details class="panel"{" open" if is_open else ""}>{inner}</details>')


def _checkpoints(run: Run) -> Html:
    if not run.checkpoints:
        return element("p", "None.", class_="empty")
    rows = [
        [
            checkpoint.name,
            f"{checkpoint.step:,}",
            show_bytes(checkpoint.num_bytes),
            element("span", "whole", class_="good")
            if checkpoint.is_whole
            else element("span", checkpoint.problem, class_="bad"),
        ]
        for checkpoint in run.checkpoints
    ]
    return table(["folder", "step", "size", "state"], rows)


def _events(run: Run) -> Html:
    if not run.events:
        return element("p", "None recorded.", class_="empty")
    shown = run.events[-MAX_EVENTS:]
    rows = [[show_time(event.time), event.kind, f"{event.step:,}", _describe(event)] for event in shown]
    left_out = len(run.events) - len(shown)
    note = element("p", f"{left_out:,} earlier events are not shown.", class_="empty") if left_out else ""
    return fragment(note, table(["time (UTC)", "what", "step", ""], rows))


def _describe(event: Event) -> str:
    values = event.values
    if event.kind == "start":
        source = values.get("resumed_from")
        return f"layout {values.get('layout')} on {values.get('world')} ranks, " + (
            f"resumed from {source}" if source else "from the beginning"
        )
    if event.kind == "commit":
        size, stall = show_bytes(_float(values.get("num_bytes"))), show_duration(_float(values.get("stall_s")))
        return f"{size}, the loop waited {stall}"
    return str(values.get("reason", ""))


def _layout(run: Run, summary: Summary) -> Html:
    if run.recipe is None:
        return element("p", summary.layout or "Unknown: the recipe cannot be read.", class_="empty")
    layout = run.recipe.layout
    degrees = {axis: getattr(layout, axis) for axis in AXES}
    rows = [[axis, str(degree), SPLITS[axis]] for axis, degree in degrees.items() if degree > 1 or axis == "dp"]
    if layout.fsdp > 1:
        rows.append(["zero", str(layout.zero), "what fsdp shards: 1 optimizer, 2 gradients too, 3 all"])
    ranks = f"{summary.layout or 'dp1'} on {summary.world} ranks" if summary.world else summary.layout
    return fragment(element("p", ranks), table(["axis", "degree", "splits"], rows))


def _recipe(run: Run) -> Html:
    if not run.recipe_text:
        return element("p", "Unknown: recipe.json cannot be read.", class_="empty")
    return element("pre", element("code", run.recipe_text))


def _environment(run: Run) -> Html:
    if not run.environment:
        return element("p", "Unknown: environment.json cannot be read.", class_="empty")
    return table([], [[key, value] for key, value in _leaves(run.environment, "")])


def _leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value if isinstance(value, str) else json.dumps(value)


def _differences(runs: Sequence[Run]) -> Html:
    values = [flat(run.recipe) if run.recipe is not None else {} for run in runs]
    rows = [
        [key, *(show(value[key]) if key in value else ABSENT for value in values)]
        for key in dict.fromkeys(key for value in values for key in value)
        if len({show(value.get(key)) for value in values}) > 1
    ]
    content = (
        table(["key", *(run.name for run in runs)], rows)
        if rows
        else element("p", "None: the recipes are the same.", class_="empty")
    )
    return _panel("Where the recipes differ", content, is_open=True)


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
