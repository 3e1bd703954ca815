"""A timeline as a picture that stands alone: SVG, or a page of HTML around it with the figures of each rank.

Nothing is loaded from elsewhere and nothing runs. Colours follow the reader's light or dark mode.
"""

from collections.abc import Sequence
from html import escape

from drumline.schedules.action import Kind
from drumline.schedules.drawing import chunk_of, label
from drumline.schedules.simulation import Timeline

_WIDTH, _MARGIN, _ROW, _BAR, _TOP, _AXIS = 1200, 64, 34, 28, 56, 30
_LETTER, _GAP = 7.2, 8  # width of a letter of 12 px monospace, and what it leaves free

_STYLE = """
svg { font: 12px ui-monospace, Menlo, Consolas, monospace; --ink: #1b1f24; --paper: #fff; --idle: #eceff3; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e9ee; --paper: #14171b; --idle: #23282f; } }
.paper { fill: var(--paper); } .idle { fill: var(--idle); } text { fill: var(--ink); }
.title { font-size: 14px; font-weight: 600; } .axis { stroke: var(--ink); stroke-opacity: .35; }
text.on { fill: #10131a; }
.F { fill: #7fb2ff; } .B { fill: #ffb45e; } .I { fill: #ffcf5e; } .W { fill: #8fd694; }
.odd { fill-opacity: .62; } rect.F, rect.B, rect.I, rect.W { stroke: var(--paper); }
"""

_PAGE_STYLE = """
:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1240px;
padding: 0 1rem; } table { border-collapse: collapse; margin-top: 1.5rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .9rem .2rem 0; text-align: right; } th { border-bottom: 1px solid #8886; }
svg { max-width: 100%; height: auto; }
"""

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "gradient of the input",
    Kind.WEIGHT: "gradient of the weights",
}


def draw_svg(timeline: Timeline, title: str, *, width_of: float = 0.0) -> str:
    """Draws a timeline as SVG.

    Args:
        timeline: the timeline.
        title: the line above the picture.
        width_of: the time that the picture is wide, if more than the makespan.

    Returns:
        The document; each action tells its stage, micro-batch and times under the pointer.
    """
    height = _height(timeline)
    begin = min(row[0].start for row in timeline.spans)
    scale = (_WIDTH - _MARGIN - 12) / max(timeline.makespan, width_of)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        f'<style>{_STYLE}</style><rect class="paper" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="12" y="22">{escape(title)}</text>',
        *_legend(timeline),
    ]
    for rank, row in enumerate(timeline.spans):
        top = _TOP + rank * _ROW
        parts.append(f'<text x="12" y="{top + 18}">rank {rank}</text>')
        parts.append(
            f'<rect class="idle" x="{_MARGIN}" y="{top}" width="{timeline.makespan * scale:.2f}" height="{_BAR}"/>'
        )
        for span in row:
            left, width = _MARGIN + (span.start - begin) * scale, span.duration * scale
            odd = " odd" if chunk_of(timeline, span.action) % 2 else ""
            wanted = (label(timeline, span.action), str(span.action.microbatch))
            text = next((text for text in wanted if len(text) * _LETTER + _GAP <= width), "")
            told = f"{span.action}: {span.start - begin:g} to {span.end - begin:g}"
            parts.append(
                f'<rect class="{span.action.kind}{odd}" x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}">'
                f"<title>{told}</title></rect>"
            )
            if text:
                parts.append(
                    f'<text class="on" x="{left + width / 2:.2f}" y="{top + 18}" text-anchor="middle" '
                    f'pointer-events="none">{text}</text>'
                )
    parts += [*_axis(timeline, scale, height - _AXIS + 4), "</svg>"]
    return "\n".join(parts) + "\n"


def draw_together(pictures: Sequence[tuple[Timeline, str]]) -> str:
    """Draws timelines one below the other, at one scale, as one SVG.

    Args:
        pictures: timelines with the line above each.

    Returns:
        The document.
    """
    widest = max(timeline.makespan for timeline, _ in pictures)
    parts, top = [], 0
    for timeline, title in pictures:
        drawn = draw_svg(timeline, title, width_of=widest)
        parts.append(drawn.replace("<svg ", f'<svg y="{top}" ', 1))
        top += _height(timeline)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}">\n'
        f"{''.join(parts)}</svg>\n"
    )


def _height(timeline: Timeline) -> int:
    return _TOP + _ROW * len(timeline.spans) + _AXIS


def draw_html(timeline: Timeline, title: str, peaks: tuple[float, ...], picture: str = "") -> str:
    """Draws a timeline as a page: the picture, and a table of the ranks.

    Args:
        timeline: the timeline.
        title: of the page.
        peaks: the most micro-batches in flight on each rank.
        picture: SVG in place of the timeline's own.

    Returns:
        The page, complete in itself.
    """
    rows = "\n".join(
        f"<tr><td>{rank}</td><td>{busy:g}</td><td>{timeline.makespan - busy:g}</td>"
        f"<td>{1 - busy / timeline.makespan:.1%}</td><td>{peak:.4g}</td></tr>"
        for rank, (busy, peak) in enumerate(zip(timeline.busy, peaks, strict=True))
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_PAGE_STYLE}</style></head>\n<body>\n{picture or draw_svg(timeline, title)}"
        "<table><thead><tr><th>rank</th><th>busy</th><th>idle</th><th>bubble</th><th>peak in flight</th></tr></thead>\n"
        f"<tbody>\n{rows}\n</tbody></table>\n</body>\n</html>\n"
    )


def _legend(timeline: Timeline) -> list[str]:
    used = {span.action.kind for row in timeline.spans for span in row}
    parts, left = [], _MARGIN
    for kind, name in _NAMES.items():
        if kind in used:
            text = f"{kind.value} {name}"
            parts.append(f'<rect class="{kind}" x="{left}" y="32" width="12" height="12"/>')
            parts.append(f'<text x="{left + 18}" y="42">{text}</text>')
            left += round(18 + len(text) * _LETTER + 24)
    if len(timeline.placement) > len(timeline.spans):
        parts.append(f'<text x="{left}" y="42">paler: every second stage of a rank</text>')
    return parts


def _axis(timeline: Timeline, scale: float, top: int) -> list[str]:
    parts = []
    for index in range(11):
        time = timeline.makespan * index / 10
        left = _MARGIN + time * scale
        anchor = "start" if index == 0 else "end" if index == 10 else "middle"
        parts.append(f'<line class="axis" x1="{left:.2f}" x2="{left:.2f}" y1="{top - 8}" y2="{top - 2}"/>')
        parts.append(f'<text x="{left:.2f}" y="{top + 12}" text-anchor="{anchor}">{time:.4g}</text>')
    return parts
