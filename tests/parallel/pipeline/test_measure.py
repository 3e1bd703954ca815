"""Timelines of ranks whose clocks were set at different moments."""

from itertools import pairwise

import pytest

from drumline.parallel.pipeline import join
from drumline.schedules import Kind, Span, generate, simulate, uniform


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved-zero-bubble"])
@pytest.mark.parametrize("late", [(0.0, 0.0, 0.0), (0.0, 2.5, 0.7), (3.0, 0.0, 0.0)])
def test_nothing_is_used_before_it_was_sent_whatever_the_clocks(late, name):
    schedule = generate(name, 3, 6)
    real = simulate(schedule, uniform(schedule.num_stages, 1.0, 1.0, 1.0)).spans
    read = [
        tuple(Span(span.action, span.start - by, span.end - by) for span in row)
        for row, by in zip(real, late, strict=True)
    ]
    spans = join(name, schedule.placement, read).spans
    ends = {span.action: span.end for row in spans for span in row}
    for row, before in zip(spans, real, strict=True):
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(row))
        assert [b.end - b.start for b in row] == pytest.approx([b.end - b.start for b in before])
        for span in row:
            sent = span.action._replace(stage=span.action.stage - 1)
            if span.action.kind is Kind.FORWARD and sent.stage >= 0:
                assert ends[sent] <= span.start + 1e-9
    assert min(row[0].start for row in spans) == 0.0
    if not any(late):
        assert spans == tuple(tuple(row) for row in real)
