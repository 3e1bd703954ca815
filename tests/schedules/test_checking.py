"""The checker names the fault of every mutant, with rank and action."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from drumline.recipe.errors import CheckFailed
from drumline.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    check,
    faults,
    generate,
    simulate,
    uniform,
)


def altered(schedule, **orders):
    """The schedule with other orders on some ranks: rank1="1F0 1B0"."""
    order = list(schedule.order)
    for name, text in orders.items():
        order[int(name.removeprefix("rank"))] = tuple(
            Action(int(cell[0]), Kind(cell[1]), int(cell[2])) for cell in text.split()
        )
    return Schedule("mutant", schedule.num_microbatches, schedule.placement, tuple(order))


SOUND = generate("1f1b", 2, 2)  # rank 0: 0F0 0F1 0B0 0B1   rank 1: 1F0 1B0 1F1 1B1
SPLIT = generate("zb-h1", 2, 2)  # rank 0: 0F0 0F1 0I0 0W0 0I1 0W1   rank 1: 1F0 1I0 1F1 1I1 1W0 1W1


@pytest.mark.parametrize(
    ("mutant", "expected"),
    [
        (altered(SOUND, rank0="0F0 0B0 0B1"), ["0F1 is missing on rank 0   [missing]"]),
        (altered(SOUND, rank1="1F0 1B0 1F1"), ["1B1 (or 1I1 and 1W1) is missing on rank 1   [missing]"]),
        (altered(SPLIT, rank0="0F0 0F1 0I0 0W0 0I1"), ["0W1 is missing on rank 0, which has 0I1   [missing]"]),
        (altered(SPLIT, rank1="1F0 1F1 1I1 1W0 1W1"), ["1I0 is missing on rank 1, which has 1W0   [missing]"]),
        (altered(SOUND, rank0="0F0 0F1 0F1 0B0 0B1"), ["0F1 is there 2 times, on rank 0   [duplicate]"]),
        (
            altered(SOUND, rank0="0F0 0F1 0B0 0B1 1F1"),
            [
                "1F1 is there 2 times, on ranks 0, 1   [duplicate]",
                "rank 0 has 1F1, but stage 1 is on rank 1   [wrong-rank]",
            ],
        ),
        (
            altered(SPLIT, rank0="0F0 0F1 0B0 0W0 0I1 0W1"),
            [
                "stage 0 has both a whole backward 0B0 and a part of it, 0W0, on micro-batch 0   [two-backwards]",
            ],
        ),
        (
            altered(SOUND, rank0="0F0 0F1 0B0 0B1 2F0 0F7"),
            [
                "rank 0 has 2F0, but there are 2 stages and 2 micro-batches   [unknown]",
                "rank 0 has 0F7, but there are 2 stages and 2 micro-batches   [unknown]",
            ],
        ),
        (altered(SOUND, rank0="0B0 0F0 0F1 0B1"), ["rank 0 has 0B0 before 0F0, which it waits for   [too-early]"]),
        (
            altered(SPLIT, rank0="0F0 0F1 0W0 0I0 0I1 0W1"),
            ["rank 0 has 0W0 before 0I0, which it waits for   [too-early]"],
        ),
        (
            altered(SOUND, rank0="0F0 0B0 0F1 0B1", rank1="1F0 1F1 1B0 1B1"),
            [
                "ranks 0, 1 cannot go on: rank 0 at 0B0 waits for 1B0 of rank 1; "
                "rank 1 at 1F1 waits for 0F1 of rank 0   [deadlock]"
            ],
        ),
    ],
)
def test_a_mutant_is_named(mutant, expected):
    found = faults(mutant)
    assert [str(fault) for fault in found] == expected
    with pytest.raises(ScheduleError) as raised:
        check(mutant)
    assert all(line in str(raised.value) for line in expected)
    assert isinstance(raised.value, CheckFailed)
    with pytest.raises(ScheduleError):
        simulate(mutant, uniform(2, 1, 1, 1))


def test_a_rank_that_only_waits_for_the_stuck_ones_is_named_but_not_in_the_circle():
    order = [list(actions) for actions in generate("1f1b", 4, 4).order]
    order[2] = [Action(2, Kind("FB"[index % 2]), index // 2) for index in range(8)]  # one at a time
    order[3] = [Action(3, kind, microbatch) for kind in (Kind.FORWARD, Kind.BACKWARD) for microbatch in range(4)]
    (fault,) = faults(Schedule("mutant", 4, (0, 1, 2, 3), tuple(map(tuple, order))))
    assert fault.message == (
        "ranks 0, 1, 2, 3 cannot go on: rank 2 at 2B0 waits for 3B0 of rank 3; rank 3 at 3F1 waits for 2F1 of rank 2"
    )


def test_a_rank_without_a_stage_is_named():
    (fault,) = faults(Schedule("mutant", 1, (0,), (generate("1f1b", 1, 1).order[0], ())))
    assert str(fault) == "rank 1 has no action   [empty]"


def test_many_faults_are_counted_and_not_all_printed():
    with pytest.raises(ScheduleError, match="81 faults") as raised:
        check(altered(generate("gpipe", 1, 40), rank0=""))
    assert len(raised.value.faults) == 81
    assert str(raised.value).endswith("... and 61 more")


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.data())
def test_dropping_or_doubling_any_action_is_found(name, data):
    schedule = generate(name, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8)))
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    index = data.draw(st.integers(0, len(schedule.order[rank]) - 1))
    action = schedule.order[rank][index]
    for copies, code in ((0, "missing"), (2, "duplicate")):
        row = schedule.order[rank][:index] + (action,) * copies + schedule.order[rank][index + 1 :]
        order = (*schedule.order[:rank], row, *schedule.order[rank + 1 :])
        found = faults(Schedule("mutant", schedule.num_microbatches, schedule.placement, order))
        assert any(fault.code == code and str(action) in fault.message for fault in found)


def happens(order, num_stages):
    """Whether a schedule ends, by trying every rank again and again: slow and plain."""
    position, done = [0] * len(order), set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            if position[rank] == len(actions):
                continue
            stage, kind, microbatch = action = actions[position[rank]]
            has = {
                "F": stage == 0 or (stage - 1, "F", microbatch) in done,
                "W": (stage, "I", microbatch) in done,
            }.get(kind.value)
            if has is None:
                after = any((stage + 1, other, microbatch) in done for other in "BI")
                has = (stage, "F", microbatch) in done and (stage == num_stages - 1 or after)
            if has:
                done.add((action.stage, action.kind.value, action.microbatch))
                position[rank] += 1
                moved = True
    return all(position[rank] == len(actions) for rank, actions in enumerate(order))


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.data())
def test_a_shuffled_schedule_is_sound_exactly_if_it_ends(name, data):
    schedule = generate(name, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)))
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    size = len(schedule.order[rank])
    first, second = data.draw(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)))
    assume(first != second)
    row = list(schedule.order[rank])
    row[first], row[second] = row[second], row[first]
    order = (*schedule.order[:rank], tuple(row), *schedule.order[rank + 1 :])
    found = faults(Schedule("mutant", schedule.num_microbatches, schedule.placement, order))
    assert (found == ()) == happens(order, schedule.num_stages)
    assert {fault.code for fault in found} <= {"too-early", "deadlock"}
