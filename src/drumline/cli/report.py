"""`drumline report`: the story of a run as one HTML file, or its figures as JSON."""

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_NAME = "report.html"


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; several stand side by side.", metavar="RUN...")],
    out: Annotated[
        Path | None,
        typer.Option(help="The HTML file; default RUN/report.html, or ./report.html for several runs."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as one JSON document; writes HTML only with --out.")
    ] = False,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the report in a browser.")] = False,
) -> None:
    """Write a run's report: one HTML file that opens offline."""
    from drumline.report import read_run, summarize, write_report
    from drumline.report.units import show_bytes

    read = [read_run(folder) for folder in runs]
    path = out or (None if as_json else runs[0] / DEFAULT_NAME if len(runs) == 1 else Path(DEFAULT_NAME))
    if path is not None:
        write_report(read, path)
    if as_json:
        document = {"runs": [summarize(run).to_json() for run in read], "report": str(path) if path else None}
        typer.echo(json.dumps(document, indent=2))
    elif path is not None:
        for run in read:
            for note in run.notes:
                typer.echo(f"{run.name}: {note}", err=True)
        typer.echo(f"{path}  ({show_bytes(path.stat().st_size)}, opens offline)")
    if show and path is not None:
        webbrowser.open(path.absolute().as_uri())
