"""Timelines that can be worked out by hand."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.recipe.errors import DrumlineError
from drumline.schedules import SCHEDULES, Durations, Kind, from_csv, generate, simulate, uniform


def starts(timeline):
    return {str(span.action): span.start for row in timeline.spans for span in row}


def test_one_micro_batch_goes_up_and_down_and_pays_the_latency_at_every_hop():
    timeline = simulate(generate("1f1b", 3, 1), uniform(3, 1, 1, 1, latency=0.25))
    assert starts(timeline) == {"0F0": 0, "1F0": 1.25, "2F0": 2.5, "2B0": 3.5, "1B0": 5.75, "0B0": 8}
    assert timeline.makespan == 10
    assert timeline.busy == (3, 3, 3)
    assert timeline.bubble_fraction == pytest.approx(0.7)


def test_stages_of_one_rank_pay_no_latency():
    timeline = simulate(generate("zbv", 1, 1), uniform(2, 1, 1, 1, latency=100))
    assert timeline.makespan == 6


def test_the_input_gradient_leaves_before_the_weight_gradient_is_computed():
    whole, split = (
        simulate(from_csv(text, "by hand"), uniform(2, 1, 2, 3))
        for text in ("0F0,0B0\n1F0,1B0\n", "0F0,0B0\n1F0,1I0,1W0\n")
    )
    assert starts(whole)["0B0"] == 7
    assert starts(split)["0B0"] == starts(split)["1W0"] == 4


def test_a_slow_stage_sets_the_pace():
    times = {Kind.FORWARD: (1, 5, 1), Kind.BACKWARD: (2, 10, 2)}
    timeline = simulate(generate("1f1b", 3, 16), Durations(times))
    assert timeline.busy == (48, 240, 48)
    assert timeline.makespan == 1 + 240 + 2  # it waits for one forward, and one backward waits for it
    assert timeline.inner_bubble_fraction == pytest.approx(1 - 48 / timeline.makespan)


def test_the_inner_bubble_leaves_out_the_time_before_a_ranks_first_and_after_its_last_action():
    timeline = simulate(generate("1f1b", 2, 1), uniform(2, 1, 1, 1))
    assert (timeline.bubble_fraction, timeline.inner_bubble_fraction) == (0.5, 0.5)  # rank 0 waits in its middle
    timeline = simulate(generate("zbv", 4, 8), uniform(8, 1, 1, 1))
    assert timeline.bubble_fraction == pytest.approx(3 / 51)
    assert timeline.inner_bubble_fraction == 0


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.integers(1, 6), st.integers(1, 12), st.floats(0, 2))
def test_no_action_starts_before_what_it_needs_has_arrived(name, ranks, microbatches, latency):
    schedule = generate(name, ranks, microbatches)
    timeline = simulate(schedule, uniform(schedule.num_stages, 1, 1.5, 0.5, latency))
    home = dict(enumerate(schedule.placement))
    end = {span.action: span.end for row in timeline.spans for span in row}
    gradient = {(a.stage, a.microbatch): time for a, time in end.items() if a.kind in (Kind.BACKWARD, Kind.INPUT)}
    forward = {(a.stage, a.microbatch): time for a, time in end.items() if a.kind is Kind.FORWARD}
    for row, actions in zip(timeline.spans, schedule.order, strict=True):
        assert tuple(span.action for span in row) == actions  # what is simulated is what is executed
        assert all(before.end <= after.start for before, after in pairwise(row))
        for span in row:
            stage, kind, microbatch = span.action
            source = stage - 1 if kind is Kind.FORWARD else stage + 1
            given_by = forward if kind is Kind.FORWARD else gradient
            if kind is not Kind.WEIGHT and source in home:
                wait = 0 if home[source] == home[stage] else latency
                assert span.start >= given_by[source, microbatch] + wait
            if kind is not Kind.FORWARD:
                assert span.start >= (gradient if kind is Kind.WEIGHT else forward)[stage, microbatch]


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        (uniform(3, 1, 1, 1), "3 durations of forward for 2 stages"),
        (uniform(2, 1, -1, 1), "a duration of input is -1"),
        (uniform(2, float("nan"), 1, 1), "a duration of forward is nan"),
        (uniform(2, 1, 1, 1, latency=float("inf")), "a duration of the latency is inf"),
        (uniform(2, 0, 0, 0), "every action takes no time"),
        (Durations({Kind.FORWARD: (1, 1)}), "no durations of backward"),
    ],
)
def test_durations_that_are_none_are_refused(durations, message):
    with pytest.raises(DrumlineError, match=message):
        simulate(generate("1f1b", 2, 2), durations)
