"""Communication added to schedules: the ends of each pair of ranks agree on the order, and nobody waits in a circle."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Receive,
    Send,
    forwards_only,
    generate,
    handed_over,
    looped,
    peak_in_flight,
    programs,
    v_shaped,
)
from drumline.schedules.execution import inputs, outputs


def run_blocking(made, num_stages):
    """Runs programs as NCCL would on one stream a rank: a transfer blocks all later transfers of both its ends until
    both have come to it, and an action waits for its inputs. Whoever is stuck stays stuck."""
    transfers = [[step for step in program if not isinstance(step, Action)] for program in made]
    actions = [[step for step in program if isinstance(step, Action)] for program in made]
    # A transfer cannot start before its rank has issued it: before that come the actions that the program has first.
    ready_after = []
    for program in made:
        count, after = 0, []
        for step in program:
            if isinstance(step, Action):
                count += 1
            else:
                after.append(count if isinstance(step, Send) else 0)
        ready_after.append(after)
    position, done = [0] * len(made), [0] * len(made)
    there = [set() for _ in made]
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(transfers):
            if position[rank] < len(mine) and isinstance(mine[position[rank]], Send):
                send = mine[position[rank]]
                theirs, at = transfers[send.peer], position[send.peer]
                if (
                    at < len(theirs)
                    and theirs[at] == Receive(send.result, rank)
                    and ready_after[rank][position[rank]] <= done[rank]
                ):
                    position[rank] += 1
                    position[send.peer] += 1
                    there[send.peer].add(send.result)
                    moved = True
        for rank, mine in enumerate(actions):
            while done[rank] < len(mine) and set(inputs(mine[done[rank]], num_stages)) <= there[rank]:
                there[rank].update(outputs(mine[done[rank]]))
                done[rank] += 1
                moved = True
    return all(done[rank] == len(actions[rank]) for rank in range(len(made))) and all(
        position[rank] == len(transfers[rank]) for rank in range(len(made))
    )


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    virtual = draw(st.integers(2, 3)) if SCHEDULES[name].virtual is None else None
    return generate(name, draw(st.integers(1, 5)), draw(st.integers(1, 9)), virtual)


@st.composite
def any_schedules(draw):
    if draw(st.booleans()):
        return draw(schedules())
    num_ranks = draw(st.integers(1, 5))
    placement = v_shaped(num_ranks) if draw(st.booleans()) else looped(num_ranks, draw(st.integers(1, 3)))
    return forwards_only(placement, draw(st.integers(1, 9)))


@given(any_schedules())
def test_actions_keep_their_order_and_pairs_agree_on_theirs(schedule):
    made = programs(schedule)
    for program, actions in zip(made, schedule.order, strict=True):
        assert tuple(step for step in program if isinstance(step, Action)) == actions
    seen = defaultdict(list)
    for rank, program in enumerate(made):
        for step in program:
            if not isinstance(step, Action):
                seen[rank, step.peer].append((step.result, isinstance(step, Send)))
    for (rank, peer), order in seen.items():
        assert seen[peer, rank] == [(result, not is_send) for result, is_send in order]


@given(any_schedules())
def test_every_result_for_another_rank_is_sent_behind_its_action_and_received_before_it_is_needed(schedule):
    made = programs(schedule)
    crossing = {
        (found[0], rank, found[1])
        for rank, actions in enumerate(schedule.order)
        for action in actions
        for found in [handed_over(action, schedule)]
        if found is not None and found[1] != rank
    }
    sent = [(s.result, rank, s.peer) for rank, p in enumerate(made) for s in p if isinstance(s, Send)]
    assert len(sent) == len(crossing)
    assert set(sent) == crossing
    for program in made:
        there = set()
        for before, step in zip((None, *program), program, strict=False):
            if isinstance(step, Send):
                assert step.result in outputs(before)
            elif isinstance(step, Receive):
                there.add(step.result)
            else:
                assert set(inputs(step, schedule.num_stages)) <= there
                there.update(outputs(step))


@given(any_schedules())
def test_nobody_is_stuck_where_a_transfer_blocks_all_later_ones(schedule):
    assert run_blocking(programs(schedule), schedule.num_stages)


def test_the_run_is_stuck_where_two_ranks_name_their_transfers_in_different_orders():
    made = [list(program) for program in programs(generate("1f1b", 2, 4))]
    places = [at for at, step in enumerate(made[1]) if not isinstance(step, Action)]
    a, b = places[1], places[2]
    made[1][a], made[1][b] = made[1][b], made[1][a]
    assert not run_blocking(made, 2)


def test_most_receives_of_1f1b_have_an_action_to_arrive_behind():
    program = programs(generate("1f1b", 4, 16))[1]
    waits = [
        next(later for later in program[at:] if isinstance(later, Action))
        for at, step in enumerate(program)
        if isinstance(step, Receive)
    ]
    received = [step.result for step in program if isinstance(step, Receive)]
    early = sum(result not in inputs(action, 4) for result, action in zip(received, waits, strict=True))
    assert early >= len(received) // 3


@pytest.mark.parametrize("placement", [looped(3, 2), v_shaped(3), (0,)])
def test_forwards_of_a_validation_run_each_stage_on_every_micro_batch(placement):
    schedule = forwards_only(placement, 2)
    assert sorted(action for row in schedule.order for action in row) == [
        Action(stage, Kind.FORWARD, index) for stage in range(len(placement)) for index in range(2)
    ]
    assert len(peak_in_flight(schedule)) == max(placement) + 1
