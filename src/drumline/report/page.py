"""The report: one HTML file with its data, its script, its style and plotly inside, so that it opens without a network.

Whatever comes from a run is text: it is escaped on its way into the page, and the data for the script cannot end its
element. A content security policy forbids the page every request.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from drumline import __version__
from drumline.report.charts import build_charts, resumes
from drumline.report.html import Html, element, fragment
from drumline.report.run import ReportError, Run
from drumline.report.sections import head, panels
from drumline.report.summary import summarize

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_report(runs: Sequence[Run], path: Path) -> None:
    """Writes the report of one run, or of several side by side.

    Args:
        runs: at least one.
        path: the HTML file; replaced in one instant where it exists.

    Raises:
        ReportError: plotly is not installed, or the file cannot be written.
    """
    write_whole(render(runs), path)


def write_whole(text: str, path: Path) -> None:
    """Writes a page.

    Args:
        text: of the page.
        path: the HTML file; replaced in one instant where it exists.

    Raises:
        ReportError: it cannot be written.
    """
    temporary = None
    try:
        number, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        temporary = Path(name)
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise ReportError(f"{path} cannot be written: {error.strerror}; choose another file") from error


def render(runs: Sequence[Run]) -> str:
    """The page as text.

    Args:
        runs: at least one.

    Returns:
        HTML.

    Raises:
        ReportError: plotly is not installed.
    """
    summaries = [summarize(run) for run in runs]
    title = ", ".join(run.name for run in runs)
    data = {"runs": [{"name": run.name, "resumes": resumes(run)} for run in runs], "charts": build_charts(runs)}
    body = fragment(
        head(runs, summaries),
        element("main", panels(runs, summaries)),
        element("footer", f"Written by drumline {__version__}. This file is complete: it asks nothing of a network."),
        # `</` and `<!--` would end or change the element; in JSON a `<` may stand as an escape.
        Html(f'<script type="application/json" id="data">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>'),
        Html(f"<script>{_plotly()}</script>") if data["charts"] else "",
        Html(f"<script>{asset('report.js')}</script>"),
    )
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"{element('title', f'{title} - drumline')}<style>{asset('report.css')}</style></head>\n"
        f"<body>{body}</body></html>\n"
    )


def asset(name: str) -> str:
    """A file of this room's assets."""
    return (resources.files("drumline.report") / "assets" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ReportError("the report's charts need plotly: pip install 'drumline[report]'") from None
    return get_plotlyjs()
