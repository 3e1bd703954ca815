"""What the charts show, as plain values that the page's script draws.

A chart has series; a series has a y and three x: step, tokens trained on, and hours of training, so that the reader
can choose.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drumline.report.run import Run
from drumline.report.series import smooth, thin, to_json_numbers

MAX_POINTS = 3000
SMOOTH_SHARE = 1 / 120  # of the run's steps, over which the smoothed line averages
MOST_LAYERS = 8  # with experts that are drawn one by one
FEW_STEPS = 30  # a shorter run is drawn without a smoothed line


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        column: of metrics.jsonl.
        title: above the picture, with the unit of the axis.
        tickformat: of the axis, as d3 writes it.
        hoverformat: of a value under the pointer.
        suffix: the unit behind a value under the pointer.
        ticksuffix: the unit behind a value of the axis.
        scale: what a recorded value is multiplied with.
        is_noisy: a smoothed line is drawn over it.
        is_log: its axis is logarithmic.
    """

    column: str
    title: str
    tickformat: str = "~g"
    hoverformat: str = ".5~g"
    suffix: str = ""
    ticksuffix: str = ""
    scale: float = 1.0
    is_noisy: bool = False
    is_log: bool = False


CHARTS = (
    Chart("loss", "Loss", is_noisy=True),
    Chart("mtp_loss", "Loss of tokens further ahead", is_noisy=True),
    Chart("grad_norm", "Gradient norm", is_noisy=True, is_log=True),
    Chart("lr", "Learning rate"),
    Chart("tokens_per_s", "Throughput, tokens/s", tickformat="~s", hoverformat=".4~s", suffix=" tokens/s"),
    Chart("mfu", "Model FLOP utilization", tickformat="~%", hoverformat=".1%"),
    Chart("memory_bytes", "Peak memory of rank 0, GiB", scale=2.0**-30, suffix=" GiB"),
    Chart("step_s", "Time of a step", tickformat="~s", hoverformat=".4~s", suffix="s", ticksuffix="s"),
    Chart("router.load_max", "Load of the most chosen expert, over the mean"),
    Chart("router.load_min", "Load of the least chosen expert, over the mean"),
    Chart("router.entropy", "Entropy of the routers, nats a token"),
    Chart("router.dropped", "Choices that found no room", tickformat="~%", hoverformat=".2%"),
)


def build_charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The charts of one or several runs.

    Args:
        runs: what to draw, side by side.

    Returns:
        A table a chart that has data, with its series in the order of the runs.
    """
    charts = []
    for chart in CHARTS:
        layers = _layers(chart, runs[0]) if len(runs) == 1 else []
        series = layers or [line for index, run in enumerate(runs) for line in _series(chart, run, index)]
        if series:
            charts.append(
                {
                    "key": chart.column,
                    "title": chart.title,
                    "tickformat": chart.tickformat,
                    "hoverformat": chart.hoverformat,
                    "suffix": chart.suffix,
                    "ticksuffix": chart.ticksuffix,
                    "log": chart.is_log,
                    "series": series,
                }
            )
    return charts


def resumes(run: Run) -> dict[str, list[Any]]:
    """Where a run went on from a commit, on each of the x axes.

    Args:
        run: the run.

    Returns:
        The places, by axis.
    """
    steps = [event.step for event in run.events if event.kind == "start" and event.values.get("resumed_from")]
    return _axes(run, np.array(steps, dtype=np.float64))


def _layers(chart: Chart, run: Run) -> list[dict[str, Any]]:
    """A line a layer, where few have experts."""
    names = [name for name in run.columns if name.startswith(f"{chart.column}.")]
    if not 1 < len(names) <= MOST_LAYERS:
        return []
    lines = [_line("line", run, 0, run.step, run[name]) for name in names]
    labels = [{"name": f"layer {name.rpartition('.')[2]}", "hue": hue} for hue, name in enumerate(names)]
    return [line | label for line, label in zip(lines, labels, strict=True)]


def _series(chart: Chart, run: Run, index: int) -> list[dict[str, Any]]:
    if chart.column not in run.columns:
        return []
    values = run[chart.column] * chart.scale
    lines = []
    if np.isfinite(values).any():
        is_smoothed = chart.is_noisy and len(values) >= FEW_STEPS
        lines.append(_line("raw" if is_smoothed else "line", run, index, run.step, values))
        if is_smoothed:
            smoothed = smooth(values, max(len(values) * SMOOTH_SHARE, 2.0))
            lines.append(_line("smooth", run, index, run.step, smoothed))
    if chart.column == "loss" and np.isfinite(run.validation_loss).any():
        lines.append(_line("validation", run, index, run.validation_step, run.validation_loss))
    if chart.column == "step_s":
        commits = [event for event in run.events if event.kind == "commit"]
        stalls = np.array([_float(event.values.get("stall_s")) for event in commits])
        if np.isfinite(stalls).any():
            lines.append(_line("stall", run, index, np.array([event.step for event in commits]), stalls))
    return lines


def _line(kind: str, run: Run, index: int, step: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    chosen = thin(values, MAX_POINTS)
    return {"kind": kind, "run": index, **_axes(run, step[chosen]), "y": to_json_numbers(values[chosen])}


def _axes(run: Run, step: np.ndarray) -> dict[str, list[Any]]:
    """A place on the axes of steps, tokens and hours, reckoned from the run's own steps."""
    known = np.concatenate([[0.0], run.step.astype(np.float64)])
    tokens = np.concatenate([[0.0], np.cumsum(np.nan_to_num(run["num_tokens"]))])
    hours = np.concatenate([[0.0], np.cumsum(np.nan_to_num(run["step_s"])) / 3600])
    return {
        "step": to_json_numbers(step),
        "tokens": to_json_numbers(np.interp(step, known, tokens)),
        "hours": to_json_numbers(np.interp(step, known, hours)),
    }


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
