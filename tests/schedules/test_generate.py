"""Every generated schedule is sound, for any numbers; and its bubble and memory are those of the papers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.recipe.errors import DrumlineError
from drumline.schedules import SCHEDULES, Kind, faults, generate, peak_in_flight, simulate, uniform

CHOOSABLE = [name for name, entry in SCHEDULES.items() if entry.virtual is None]
TIMES = [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 1.5, 1.0)]

ranks_and_microbatches = (st.integers(1, 10), st.integers(1, 40))


def idle(schedule, forward, input_gradient, weight_gradient):
    """The longest that a rank is without work."""
    timeline = simulate(schedule, uniform(schedule.num_stages, forward, input_gradient, weight_gradient))
    return timeline.makespan - min(timeline.busy)


def bubble(schedule, forward=1.0, backward=2.0):
    return simulate(schedule, uniform(schedule.num_stages, forward, backward / 2, backward / 2)).bubble_fraction


@pytest.mark.parametrize("name", SCHEDULES)
@given(*ranks_and_microbatches)
def test_every_schedule_is_sound_for_any_number_of_ranks_and_micro_batches(name, ranks, microbatches):
    schedule = generate(name, ranks, microbatches)
    assert faults(schedule) == ()
    assert schedule.num_ranks == ranks
    assert all(len(schedule.stages_of(rank)) == schedule.num_stages // ranks for rank in range(ranks))


@pytest.mark.parametrize("name", CHOOSABLE)
@given(*ranks_and_microbatches, st.integers(2, 6))
def test_every_interleaved_schedule_is_sound_for_any_number_of_stages_a_rank(name, ranks, microbatches, virtual):
    schedule = generate(name, ranks, microbatches, virtual)
    assert faults(schedule) == ()
    assert schedule.num_stages == ranks * virtual


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.integers(1, 8), st.integers(1, 20), st.floats(0.1, 4), st.floats(0.1, 4), st.floats(0.1, 4), st.floats(0, 1))
def test_no_schedule_is_faster_than_its_work_or_than_one_micro_batchs_way(name, ranks, microbatches, f, i, w, latency):
    schedule = generate(name, ranks, microbatches)
    timeline = simulate(schedule, uniform(schedule.num_stages, f, i, w, latency))
    hops = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    work = microbatches * (f + i + w) * schedule.num_stages / ranks
    assert timeline.busy == pytest.approx([work] * ranks)
    assert timeline.makespan >= work * (1 - 1e-9)
    assert timeline.makespan >= (schedule.num_stages * (f + i) + 2 * hops * latency) * (1 - 1e-9)
    assert timeline.inner_bubble_fraction + 1e-9 >= 0
    assert timeline.inner_bubble_fraction <= timeline.bubble_fraction + 1e-9
    assert timeline.bubble_fraction < 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(*ranks_and_microbatches, st.floats(0.1, 5), st.floats(0.1, 5))
def test_the_bubble_of_gpipe_and_1f1b_is_the_closed_form(name, p, m, forward, backward):
    assert bubble(generate(name, p, m), forward, backward) == pytest.approx((p - 1) / (m + p - 1))


@given(st.integers(1, 8), st.integers(1, 6), st.integers(2, 5), st.floats(0.1, 5), st.floats(0.1, 5))
def test_the_bubble_of_interleaved_1f1b_is_the_closed_form(p, rounds, v, forward, backward):
    m = rounds * p
    schedule = generate("interleaved-1f1b", p, m, v)
    assert bubble(schedule, forward, backward) == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("forward", "input_gradient", "weight_gradient"), TIMES)
@given(st.integers(1, 8), st.integers(0, 20))
def test_the_idle_time_of_zb_h1_is_the_papers(forward, input_gradient, weight_gradient, p, more):
    schedule = generate("zb-h1", p, 2 * p + more)
    expected = (p - 1) * (forward + input_gradient - weight_gradient)
    assert idle(schedule, forward, input_gradient, weight_gradient) == pytest.approx(expected)


@pytest.mark.parametrize(("forward", "input_gradient", "weight_gradient"), TIMES)
@given(st.integers(1, 8), st.integers(2, 6), st.integers(2, 4))
def test_interleaving_zero_bubble_stages_idles_and_holds_as_zb_h1(forward, input_gradient, weight_gradient, p, n, v):
    schedule = generate("interleaved-zero-bubble", p, n * p, v)
    expected = (p - 1) * (forward + input_gradient - weight_gradient)
    assert idle(schedule, forward, input_gradient, weight_gradient) == pytest.approx(expected)
    assert peak_in_flight(schedule) == (v * p,) * p


@pytest.mark.parametrize(("forward", "input_gradient", "weight_gradient"), TIMES)
def test_zb_h1_idles_less_than_1f1b_by_twice_the_weight_gradient_a_hop(forward, input_gradient, weight_gradient):
    times = (forward, input_gradient, weight_gradient)
    saved = idle(generate("1f1b", 4, 12), *times) - idle(generate("zb-h1", 4, 12), *times)
    assert saved == pytest.approx(3 * 2 * weight_gradient)


@given(*ranks_and_microbatches)
def test_zbv_has_no_bubble_within_a_rank_when_all_parts_take_the_same_time(p, m):
    schedule = generate("zbv", p, max(m, 2 * p - 1))
    assert simulate(schedule, uniform(schedule.num_stages, 1, 1, 1)).inner_bubble_fraction == pytest.approx(0)


@pytest.mark.parametrize(("forward", "input_gradient", "weight_gradient"), TIMES)
@given(st.integers(1, 8), st.integers(0, 12))
def test_dualpipev_idles_at_most_as_long_as_published(forward, input_gradient, weight_gradient, p, more):
    backward = input_gradient + weight_gradient
    published = (p - 1) * (forward + backward + backward - 3 * weight_gradient)
    assert idle(generate("dualpipev", p, 2 * p + more), forward, input_gradient, weight_gradient) <= published + 1e-9


@given(*ranks_and_microbatches)
def test_gpipe_holds_every_micro_batch(p, m):
    assert peak_in_flight(generate("gpipe", p, m)) == (m,) * p


@given(*ranks_and_microbatches)
def test_1f1b_holds_one_micro_batch_for_each_rank_from_its_own_on(p, m):
    assert peak_in_flight(generate("1f1b", p, m)) == tuple(min(p - rank, m) for rank in range(p))


@given(*ranks_and_microbatches)
def test_zb_h1_holds_on_every_rank_what_1f1b_holds_on_its_first(p, m):
    assert peak_in_flight(generate("zb-h1", p, m)) == (min(p, m),) * p


@given(st.integers(1, 8), st.integers(1, 6), st.integers(2, 5))
def test_interleaved_1f1b_holds_its_warm_up_and_one_more(p, rounds, v):
    m = rounds * p
    expected = tuple(min(v * m, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p))
    assert peak_in_flight(generate("interleaved-1f1b", p, m, v)) == expected


@given(*ranks_and_microbatches)
def test_the_v_shaped_hold_two_half_stages_for_each_rank(p, m):
    assert max(peak_in_flight(generate("zbv", p, m))) <= 2 * p
    assert max(peak_in_flight(generate("dualpipev", p, m))) <= 2 * p + 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_loss_is_where_the_placement_says(name):
    schedule = generate(name, 4, 8)
    last = schedule.num_stages - 1
    assert schedule.placement[last] == (0 if name in ("zbv", "dualpipev") else 3)


def test_only_zero_bubble_schedules_split_the_backward():
    split = {name for name in SCHEDULES if generate(name, 4, 8).is_split}
    assert split == {"zb-h1", "interleaved-zero-bubble", "zbv", "dualpipev"}
    assert {action.kind for action in generate("1f1b", 2, 2).order[0]} == {Kind.FORWARD, Kind.BACKWARD}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("1f2b", 4, 8), "there is no schedule '1f2b'; did you mean 1f1b"),
        (("xyzzy", 4, 8), "There are gpipe, 1f1b"),
        (("1f1b", 0, 8), "the pipeline degree is 0"),
        (("1f1b", 4, 0), "the number of micro-batches is 0"),
        (("1f1b", 4, 8, 2), "1f1b has 1 stage a rank, not 2; with 2 there are interleaved-1f1b, "),
        (
            ("zbv", 4, 8, 3),
            "zbv has 2 stages a rank, not 3; with 3 there are interleaved-1f1b, interleaved",
        ),
        (("zbv", 4, 8, 0), "zbv has 2 stages a rank, not 0"),
        (("interleaved-1f1b", 4, 8, 1), "at least 2 stages a rank, not 1; 1f1b is"),
        (("interleaved-zero-bubble", 4, 8, -1), "at least 2 stages a rank, not -1; zb-h1 is"),
        (("gpipe", 2**20, 2**20), "at most 1,000,000 are supported"),
    ],
)
def test_what_cannot_be_generated_is_refused_with_what_would_work(args, message):
    with pytest.raises(DrumlineError) as raised:
        generate(*args)
    assert message in str(raised.value)
