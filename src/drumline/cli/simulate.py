"""`drumline simulate`: what a run would do, computed without running it. Needs no torch."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drumline.cli.durations import read_durations
from drumline.cli.environment import terminal
from drumline.cli.output import print_json, print_table
from drumline.recipe.errors import DrumlineError

if TYPE_CHECKING:
    from drumline.schedules import Action, Schedule, Timeline

simulate = typer.Typer(
    help="Simulate pipeline schedules.", rich_markup_mode=None, no_args_is_help=True, add_completion=False
)

_FORMS = (".svg", ".html", ".csv")
_COLOURS = {"F": 34, "B": 33, "I": 33, "W": 32}


@simulate.callback()
def _simulate() -> None:
    """Keeps `schedule` a command of its own, also while it is the only one."""


@simulate.command("schedule")
def simulate_schedule(
    name: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            metavar="NAME|FILE",
            help="gpipe, 1f1b, interleaved-1f1b, zb-h1, interleaved-zero-bubble, zbv, dualpipev, "
            "all (compares them), or a CSV file in the form of torch.distributed.pipelining.",
        ),
    ] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Ranks of the pipeline. A file has its own.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Micro-batches a step. A file has its own.")] = None,
    virtual: Annotated[
        int | None, typer.Option(min=1, help="Stages a rank, where the schedule lets one choose; 2 by default.")
    ] = None,
    forward: Annotated[
        str,
        typer.Option(
            help="Time of a micro-batch's forward on a rank, shared by its stages; or a,b,... for each stage."
        ),
    ] = "1",
    backward: Annotated[
        str | None, typer.Option(help="The same for the backward.", show_default="2, or input and weight together")
    ] = None,
    input_gradient: Annotated[
        str | None, typer.Option("--input", help="The backward's part for the input.", show_default="half of it")
    ] = None,
    weight_gradient: Annotated[
        str | None, typer.Option("--weight", help="The backward's part for the weights.", show_default="the rest of it")
    ] = None,
    latency: Annotated[float, typer.Option(help="Time for a result to reach another rank.")] = 0.0,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A step that a run timed (run.timeline; RUN/pipeline.json): draws it above the simulation of its own "
            "schedule with its own durations.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the timeline to x.svg or x.html, or the schedule to x.csv.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check a pipeline schedule, and draw when each rank computes what.

    Exits 1 when a schedule from a file has faults.
    """
    from drumline.schedules import SCHEDULES, ScheduleError, faults
    from drumline.schedules import simulate as find_timeline

    if out and out.suffix not in _FORMS:
        raise DrumlineError(f"--out {out} ends with {out.suffix!r}; it can be written as {', '.join(_FORMS)}")
    if measured is not None:
        if name is not None:
            raise DrumlineError("--measured FILE has its own schedule: leave --schedule out")
        _show_measured(measured, latency, out, as_json)
        return
    if name is None:
        raise DrumlineError("give --schedule NAME|FILE, such as --schedule 1f1b, or --measured FILE")
    times = (forward, backward, input_gradient, weight_gradient, latency)
    if name == "all":
        if out or virtual:
            raise DrumlineError("--schedule all takes neither --out nor --virtual; name one schedule")
        made = [_find(each, pp, microbatches, None) for each in SCHEDULES]
        _compare([_summary(each, find_timeline(each, read_durations(each, *times))) for each in made], as_json)
        return
    schedule = _find(name, pp, microbatches, virtual)
    if found := faults(schedule):
        if as_json:
            listed = [{"code": fault.code, "message": fault.message} for fault in found]
            print_json({**_facts(schedule), "faults": listed})
            raise typer.Exit(1)
        raise ScheduleError(schedule.name, found)
    timeline = find_timeline(schedule, read_durations(schedule, *times))
    if out:
        _write(out, schedule, timeline)
    if as_json:
        spans = [[[str(span.action), span.start, span.end] for span in row] for row in timeline.spans]
        order = [[str(action) for action in actions] for actions in schedule.order]
        print_json({**_summary(schedule, timeline), "order": order, "spans": spans, "faults": []})
        return
    _print(schedule, timeline)
    if out:
        typer.echo(f"{out}")


def _show_measured(path: Path, latency: float, out: Path | None, as_json: bool) -> None:
    """A measured step above its simulation."""
    from dataclasses import replace

    from drumline.schedules import (
        draw_html,
        draw_text,
        draw_together,
        mean_durations,
        read_timeline,
        schedule_of,
        to_csv,
    )
    from drumline.schedules import simulate as find_timeline

    real = read_timeline(path)
    schedule = schedule_of(real)
    simulated = find_timeline(schedule, replace(mean_durations(real), latency=latency))
    pictures = [(real, f"measured, {_title(schedule, real)}"), (simulated, f"simulated, {_title(schedule, simulated)}")]
    if out:
        together = draw_together(pictures)
        text = {
            ".svg": lambda: together,
            ".html": lambda: draw_html(real, pictures[0][1], _peak_microbatches(schedule), together),
            ".csv": lambda: to_csv(schedule),
        }[out.suffix]()
        _write_text(out, text)
    if as_json:
        print_json({"measured": _summary(schedule, real), "simulated": _summary(schedule, simulated)})
        return
    # One scale for both: the shorter one leaves the rest of its line empty.
    width = shutil.get_terminal_size((100, 24)).columns
    longest = max(timeline.makespan for timeline, _ in pictures)
    for timeline, title in pictures:
        typer.echo(title)
        typer.echo(draw_text(timeline, max(20, round(width * timeline.makespan / longest))))
    if out:
        typer.echo(f"{out}")


def _find(name: str, pp: int | None, microbatches: int | None, virtual: int | None) -> "Schedule":
    """Generates the schedule, or reads it from a file and holds it against what was asked."""
    from drumline.schedules import SCHEDULES, generate, read_file

    path = Path(name)
    if name not in SCHEDULES and (path.suffix == ".csv" or path.is_file()):
        schedule = read_file(path)
        own = (schedule.num_ranks, schedule.num_microbatches, schedule.num_stages / schedule.num_ranks)
        for option, asked, found in zip(
            ("pp", "microbatches", "virtual"), (pp, microbatches, virtual), own, strict=True
        ):
            if asked not in (None, found):
                raise DrumlineError(f"--{option} {asked}: the schedule in {name} has {found:g}")
        return schedule
    if pp is None or microbatches is None:
        generate(name, 1, 1, virtual)  # a wrong name is told first
        missing = " and ".join(
            option for option, value in (("--pp", pp), ("--microbatches", microbatches)) if value is None
        )
        raise DrumlineError(f"{name} needs {missing}, such as --pp 4 --microbatches 8")
    return generate(name, pp, microbatches, virtual)


def _facts(schedule: "Schedule") -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "placement": schedule.placement,
    }


def _summary(schedule: "Schedule", timeline: "Timeline") -> dict[str, Any]:
    from drumline.schedules import peak_in_flight

    return {
        **_facts(schedule),
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "inner_bubble_fraction": timeline.inner_bubble_fraction,
        "busy": timeline.busy,
        "peak_in_flight": peak_in_flight(schedule),
        "peak_microbatches": _peak_microbatches(schedule),
    }


def _peak_microbatches(schedule: "Schedule") -> tuple[float, ...]:
    """What each rank holds at most, in micro-batches through all of its layers."""
    from drumline.schedules import peak_in_flight

    return tuple(peak / len(schedule.stages_of(rank)) for rank, peak in enumerate(peak_in_flight(schedule)))


def _title(schedule: "Schedule", timeline: "Timeline") -> str:
    return (
        f"{schedule.name}: {_counted(schedule.num_ranks, 'rank')}, {_counted(schedule.num_stages, 'stage')}, "
        f"{_counted(schedule.num_microbatches, 'micro-batch')}; makespan {timeline.makespan:g}, "
        f"bubble {timeline.bubble_fraction:.1%}"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def _write(path: Path, schedule: "Schedule", timeline: "Timeline") -> None:
    from drumline.schedules import draw_html, draw_svg, to_csv

    title = _title(schedule, timeline)
    text = {
        ".svg": lambda: draw_svg(timeline, title),
        ".html": lambda: draw_html(timeline, title, _peak_microbatches(schedule)),
        ".csv": lambda: to_csv(schedule),
    }[path.suffix]()
    _write_text(path, text)


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DrumlineError(f"{path} cannot be written: {error.strerror}") from error


def _print(schedule: "Schedule", timeline: "Timeline") -> None:
    from drumline.schedules import draw_text

    has_color = terminal(sys.stdout).has_color

    def paint(action: "Action", text: str) -> str:
        return f"\x1b[{_COLOURS[action.kind]}m{text}\x1b[0m" if has_color else text

    typer.echo(_title(schedule, timeline))
    typer.echo(draw_text(timeline, shutil.get_terminal_size((100, 24)).columns, paint))
    rows = [
        (
            str(rank),
            ", ".join(map(str, schedule.stages_of(rank))),
            f"{busy:g}",
            f"{timeline.makespan - busy:g}",
            f"{1 - busy / timeline.makespan:.1%}",
            f"{peak:.4g}",
        )
        for rank, (busy, peak) in enumerate(zip(timeline.busy, _peak_microbatches(schedule), strict=True))
    ]
    columns = ("rank", "stages", "busy", "idle", "bubble", "peak in flight")
    print_table(columns, rows, (columns[0], *columns[2:]))


def _compare(summaries: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(summaries)
        return
    columns = ("schedule", "stages", "makespan", "bubble", "within a rank", "peak in flight")
    rows = [
        (
            each["schedule"],
            str(each["num_stages"]),
            f"{each['makespan']:g}",
            f"{each['bubble_fraction']:.1%}",
            f"{each['inner_bubble_fraction']:.1%}",
            f"{max(each['peak_microbatches']):g}",
        )
        for each in summaries
    ]
    print_table(columns, rows, columns[1:])
