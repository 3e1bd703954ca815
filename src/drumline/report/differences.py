"""The report of two captures: one HTML file without scripts, whose pictures are SVG, so that it opens anywhere."""

import math
from collections.abc import Sequence
from pathlib import Path

from drumline import __version__
from drumline.capture.diff import Diff, Row
from drumline.capture.reading import Manifest
from drumline.report.html import Html, element, fragment, table
from drumline.report.page import asset, write_whole

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
.flow { width: 100%; height: 260px; display: block; } .flow text { font-size: 11px; fill: var(--soft); }
.map { display: block; } .maps figure { margin: 0 0 18px; } .maps figcaption { margin: 0 0 6px; }
.maps code { font-size: 13px; } .legend { padding-left: 12px; }
.legend span { margin-right: 16px; white-space: nowrap; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 5px; }
section.chart { margin-top: 16px; } .verdict { font-size: 19px; font-weight: 600; }
"""
COLOURS = {
    "init": "#8a94a0",
    "forward": "#1d5fd1",
    "router": "#0e8a86",
    "choice": "#0e8a86",
    "recompute": "#6f4fc2",
    "loss": "#b3261e",
    "routing": "#0e8a86",
    "backward": "#c26a00",
    "gradient": "#14713c",
    "norm": "#b3261e",
    "optimizer": "#9a3d8b",
    "weight": "#3d4a57",
}
WIDTH, HEIGHT, LEFT, FLOOR = 1180, 240, 46, 1e-9


def write_differences(
    found: Diff, path: Path, manifests: tuple[Manifest, Manifest], located: Sequence[str] = ()
) -> None:
    """Writes the report.

    Args:
        found: the comparison.
        path: the HTML file; replaced in one instant where it exists.
        manifests: of a and b.
        located: lines that say where the two part.

    Raises:
        ReportError: the file cannot be written.
    """
    write_whole(render(found, manifests, located), path)


def render(found: Diff, manifests: tuple[Manifest, Manifest], located: Sequence[str] = ()) -> str:
    """The page as text."""
    title = f"{Path(found.folders[0]).name} and {Path(found.folders[1]).name}"
    body = fragment(
        element(
            "header",
            element("h1", title),
            _verdict(found),
            *[element("p", line) for line in located],
            _sides(found, manifests),
        ),
        element("main", _flow(found), _table(found), _operators(found), _maps(found)),
        element("footer", f"Written by drumline {__version__}. This file is complete: it asks nothing of a network."),
    )
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{element('title', f'{title} - drumline')}<style>{asset('report.css')}{STYLE}</style></head>\n"
        f"<body>{body}</body></html>\n"
    )


def _verdict(found: Diff) -> Html:
    if found.is_equal:
        words = f"All {len(found.rows):,} tensors are equal" + (
            f" within {found.tolerance:g}." if found.tolerance else " bit for bit."
        )
        return element("p", words, class_="verdict good")
    if not found.first:
        return element("p", "All tensors are equal; operators inside of modules differ.", class_="verdict bad")
    row = next((row for row in found.different if row.key == found.first), None)
    why = row.why if row else "only one of the two has it"
    return fragment(
        element("p", f"{len(found.different):,} of {len(found.rows):,} tensors differ.", class_="verdict bad"),
        element("p", "The first in the order of a step: ", element("code", found.first), f": {why}."),
    )


def _sides(found: Diff, manifests: tuple[Manifest, Manifest]) -> Html:
    rows = []
    for name, folder, manifest in zip("ab", found.folders, manifests, strict=True):
        versions = manifest.environment
        packages = versions.get("packages", {})
        precision = manifest.recipe.get("precision", {}).get("compute", "")
        steps = ", ".join(map(str, manifest.steps))
        made = f"drumline {versions.get('drumline', '?')}, torch {packages.get('torch', '?')}"
        rows.append([name, folder, manifest.layout, str(manifest.num_ranks), precision, manifest.level, steps, made])
    header = ["", "capture", "layout", "ranks", "precision", "level", "steps", "written by"]
    changed = [[f"the recipes differ in {name}", f"{x} in a, {y} in b"] for name, x, y in found.recipe]
    only = [
        [f"only in {side}: {len(names):,} tensors", f"such as {names[0]}"]
        for side, names in zip("ab", found.only, strict=True)
        if names
    ]
    notes = table([], changed + only) if changed or only else ""
    return fragment(table(header, rows, "comparison"), notes)


def _flow(found: Diff) -> Html:
    """A bar a tensor in the order of the flow of data, as high as the logarithm of its relative difference."""
    rows = [row for row in found.rows if row.difference is not None]
    if not rows:
        return Html("")
    step = (WIDTH - LEFT) / len(rows)
    parts = [_grid_line(10.0**power) for power in range(-8, 1, 2)]
    for index, row in enumerate(rows):
        assert row.difference is not None
        top = _height(row.difference.relative)
        colour = COLOURS.get(_kind(row), "#000")
        label = f"{row.key}: {row.difference.relative:.1e}"
        box = {"x": f"{LEFT + index * step:.2f}", "width": f"{max(1.0, step * 0.8):.2f}", "fill": colour}
        parts.append(
            element("rect", element("title", label), y=f"{HEIGHT - top:.1f}", height=f"{max(top, 1.0):.1f}", **box)
        )
    picture = element("svg", *parts, class_="flow", viewBox=f"0 0 {WIDTH} {HEIGHT + 4}", preserveAspectRatio="none")
    kinds = dict.fromkeys(_kind(row) for row in rows)
    legend = [element("span", element("i", style=f"background:{COLOURS.get(kind, '#000')}"), kind) for kind in kinds]
    return element(
        "section",
        element("h2", "Relative difference along the flow of data"),
        element("p", *legend, class_="legend"),
        picture,
        class_="chart",
    )


def _grid_line(value: float) -> Html:
    at = HEIGHT - _height(value)
    line = {"x1": str(LEFT), "x2": str(WIDTH), "y1": f"{at:.1f}", "y2": f"{at:.1f}", "stroke": "var(--line)"}
    return fragment(element("line", **line), element("text", f"{value:.0e}", x="2", y=f"{at + 4:.1f}"))


def _height(relative: float) -> float:
    if not relative:
        return 0.0
    share = 1.0 - math.log10(min(max(relative, FLOOR), 10.0)) / math.log10(FLOOR)
    return max(2.0, min(1.1, share) / 1.1 * HEIGHT) if math.isfinite(relative) else float(HEIGHT)


def _kind(row: Row) -> str:
    return row.key.split("/", 2)[1]


def _table(found: Diff) -> Html:
    rows = [_cells(row) for row in found.different]
    if not rows:
        return Html("")
    header = ["tensor", "unequal", "max ulp", "relative", "max abs", "slope", "worst row", "worst column", "why"]
    return element(
        "details",
        element("summary", f"{len(rows):,} tensors that differ"),
        table(header, rows),
        class_="panel",
        open="",
    )


def _cells(row: Row) -> list[str]:
    d = row.difference
    if d is None:
        return [row.key, *[""] * 7, row.why]
    return [
        row.key,
        f"{d.num_unequal:,} of {d.num_elements:,}",
        "" if d.max_ulp is None else f"{d.max_ulp:,}",
        f"{d.relative:.2e}",
        f"{d.max_abs:.2e} at {list(d.at)}",
        f"{d.slope:+.1e}",
        f"{d.worst_row[0]} ({d.worst_row[1]:.1e})",
        f"{d.worst_column[0]} ({d.worst_column[1]:.1e})",
        "" if row.why == "differs" else row.why,
    ]


def _operators(found: Diff) -> Html:
    operators = found.operators
    if operators is None or not (operators.different or operators.refused):
        return Html("")
    if operators.refused:
        return element("p", f"Operators are not compared: {operators.refused}.")
    rows = [
        [
            row.key,
            row.source,
            f"{row.ranks[0]} / {row.ranks[1]}",
            "equal" if row.inputs_are_equal else "differ",
            row.why,
        ]
        for row in operators.different
    ]
    words = f"{len(rows):,} of {operators.num_compared:,} operators that differ"
    header = ["operator", "line", "ranks of a / b", "inputs", "why"]
    return element("details", element("summary", words), table(header, rows), class_="panel", open="")


def _maps(found: Diff) -> Html:
    figures = [
        element("figure", element("figcaption", element("code", row.key), f" {list(row.shape)}"), _grid(row.map))
        for row in found.different
        if row.map
    ]
    if not figures:
        return Html("")
    words = (
        "Rows of the tensor go down, columns go right; dark is the largest difference of the tensor, "
        "red a value that is not a number in one of the two."
    )
    return element(
        "details",
        element("summary", "Where they differ"),
        element("p", words),
        element("div", *figures, class_="maps"),
        class_="panel",
        open="",
    )


def _grid(cells: Sequence[Sequence[float]], size: int = 9) -> Html:
    parts = []
    for y, row in enumerate(cells):
        for x, value in enumerate(row):
            fill = "#d6221a" if value < 0 else f"rgba(29,95,209,{math.sqrt(value):.3f})"
            box = {"x": str(x * size), "y": str(y * size), "width": str(size), "height": str(size), "fill": fill}
            if value:
                parts.append(element("rect", **box))
    wide, high = len(cells[0]) * size, len(cells) * size
    frame = element("rect", width=str(wide), height=str(high), fill="none", stroke="var(--line)")
    return element("svg", *parts, frame, class_="map", width=str(wide), height=str(high))
