"""Pictures of timelines show every action where and as long as it runs, and need nothing from elsewhere."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from drumline.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Span,
    Timeline,
    draw_html,
    draw_svg,
    draw_text,
    generate,
    simulate,
    uniform,
)

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name, ranks=2, microbatches=3, **times):
    schedule = generate(name, ranks, microbatches)
    return simulate(
        schedule, uniform(schedule.num_stages, **{"forward": 1, "input_gradient": 1, "weight_gradient": 1, **times})
    )


def test_actions_are_written_out_where_there_is_room():
    assert draw_text(timeline_of("1f1b"), 80) == (
        "rank 0  F0 F1 ..... B0--- F2 B1--- .. B2---\n"
        "rank 1  .. F0 B0--- F1 B1--- F2 B2--- ......"
    )  # fmt: skip


def test_with_several_stages_a_rank_the_text_names_the_stage():
    text = draw_text(timeline_of("interleaved-1f1b", 2, 2), 200)
    assert re.findall(r"\d+[FB]\d+", text) == [
        str(action) for row in generate("interleaved-1f1b", 2, 2).order for action in row
    ]


def test_a_narrow_terminal_gets_a_letter_for_a_slice_of_time():
    assert draw_text(timeline_of("1f1b"), 24) == (
        "rank 0  FF..BBFBB.BB\n"
        "rank 1  .FBBFBBFBB.."
    )  # fmt: skip


def test_a_ranks_second_stage_is_lower_case():
    assert draw_text(timeline_of("zbv", 1, 1), 14).split()[-1] == "FfiwIW"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [1, 40, 80, 200])
def test_no_row_is_wider_than_the_terminal_and_each_slice_has_what_runs_then(name, width):
    timeline = timeline_of(name, 3, 7, forward=1.1, weight_gradient=0.37)
    rows = draw_text(timeline, width).splitlines()
    assert len(rows) == 3
    assert all(len(row) <= max(width, 18) for row in rows)


def test_paint_gets_every_piece():
    painted = []
    draw_text(timeline_of("1f1b"), 80, lambda action, text: painted.append(str(action)) or text)
    assert sorted(painted) == sorted(str(action) for row in generate("1f1b", 2, 3).order for action in row)


def test_an_action_that_takes_no_time_does_not_break_the_picture():
    timeline = timeline_of("zb-h1", weight_gradient=0)
    assert "W" not in draw_text(timeline, 80)
    ElementTree.fromstring(draw_svg(timeline, "no weights"))


def test_a_measured_timeline_that_does_not_start_at_zero_is_drawn_like_one_that_does():
    simulated = timeline_of("1f1b")
    shifted = tuple(tuple(Span(span.action, span.start + 64, span.end + 64) for span in row) for row in simulated.spans)
    measured = Timeline("1f1b", simulated.placement, shifted)
    assert draw_text(measured, 80) == draw_text(simulated, 80)
    assert draw_svg(measured, "x") == draw_svg(simulated, "x")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_svg_has_a_box_for_every_action_as_long_as_it_lasts(name):
    timeline = timeline_of(name, 3, 5, forward=1.5)
    root = ElementTree.fromstring(draw_svg(timeline, "a <title> & more"))
    boxes = {}
    for box in root.iter(f"{SVG}rect"):
        if (told := box.find(f"{SVG}title")) is not None:
            action = told.text.split(":")[0]
            assert action not in boxes
            boxes[action] = (float(box.get("x")), float(box.get("width")), float(box.get("y")))
    spans = {str(span.action): (span, rank) for rank, row in enumerate(timeline.spans) for span in row}
    assert boxes.keys() == spans.keys()
    scale = (1200 - 64 - 12) / timeline.makespan
    for action, (span, rank) in spans.items():
        assert boxes[action] == pytest.approx(
            (64 + span.start * scale, span.duration * scale, 56 + 34 * rank), abs=0.01
        )


def test_the_page_has_the_picture_and_the_figures_and_loads_nothing():
    page = draw_html(timeline_of("zbv", 4, 8), "zbv <8>", (4.0, 3.5, 3.0, 2.5))
    assert "<title>zbv &lt;8&gt;</title>" in page
    assert page.count("<svg") == 1
    assert "<td>3.5</td>" in page
    assert not re.search(r"<script|<link|@import|src=|url\(", page)
    assert re.findall(r"https?://[^\"]+", page) == ["http://www.w3.org/2000/svg"]


def test_the_letter_of_a_slice_is_that_of_what_runs_longest_in_it():
    row = (Span(Action(0, Kind.FORWARD, 0), 0, 0.6), Span(Action(0, Kind.BACKWARD, 0), 0.6, 10))
    assert draw_text(Timeline("x", (0,), (row,)), 18) == "rank 0  FBBBBBBBBB"
