"""Against `torch.distributed.pipelining`: one order where the algorithm is the same, and each takes the other's."""

import pytest
from tests.schedules.oracles import MULTI, SINGLE, build, executed, generated, to_torch
from torch.distributed.pipelining import schedules as torch_schedules

from drumline.schedules import Schedule, faults, from_csv, generate, looped, simulate, to_csv, uniform, v_shaped

SHAPES = [(1, 1), (1, 4), (2, 2), (2, 5), (3, 6), (4, 3), (4, 8), (4, 10), (5, 12), (8, 16), (8, 24)]
V_SHAPED = ("zbv", "dualpipev")


def cases(names, least):
    """Name and shape, where torch takes it: it wants at least so many micro-batches a rank."""
    return [(name, *shape) for name in names for shape in SHAPES if shape[1] >= least.get(name, 0) * shape[0]]


@pytest.mark.parametrize(("name", "ranks", "microbatches"), cases(SINGLE, {"1f1b": 1}))
def test_gpipe_and_1f1b_are_what_torch_executes(name, ranks, microbatches):
    assert generate(name, ranks, microbatches).order == executed(name, ranks, microbatches)


def even_rounds(ranks, microbatches):
    return microbatches % max(1, microbatches // ranks) == 0


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zero-bubble"])
@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), [shape for shape in SHAPES if even_rounds(*shape)])
def test_interleaved_orders_equal_torchs(name, virtual, ranks, microbatches):
    ours = generate(name, ranks, microbatches, virtual)
    assert ours.order == generated(name, ranks, microbatches, virtual)
    assert ours.placement == looped(ranks, virtual)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), cases(V_SHAPED, {"dualpipev": 2}))
def test_v_shaped_orders_equal_torchs(name, ranks, microbatches):
    ours = generate(name, ranks, microbatches)
    assert ours.order == generated(name, ranks, microbatches, 2)
    assert ours.placement == v_shaped(ranks)


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_what_torch_dumps_is_read_and_is_sound(name, form, tmp_path):
    build(name, 4, 8, 2)._dump_csv(str(tmp_path / "dump.csv"), format=form)
    read = from_csv((tmp_path / "dump.csv").read_text(), name)
    assert faults(read) == ()
    assert read.order == generated(name, 4, 8, 2)
    assert read.placement == (v_shaped(4) if name in V_SHAPED else looped(4, 2))
    assert simulate(read, uniform(8, 1, 1, 1)).makespan >= 6 * 8


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "interleaved-zero-bubble", *V_SHAPED])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 8), (4, 11), (6, 4)])
def test_torch_accepts_ours_and_can_add_sends_and_receives_to_it(name, ranks, microbatches):
    ours = generate(name, ranks, microbatches)
    order = to_torch(ours.order)
    placement = torch_schedules._validate_schedule(order, ranks, ours.num_stages, microbatches)
    assert placement == dict(enumerate(ours.placement))
    lowered = torch_schedules._add_send_recv(order, lambda stage: ours.placement[stage], ours.num_stages)
    simulated = torch_schedules._simulate_comms_compute(
        lowered, lambda stage: ours.placement[stage], ours.num_stages
    )  # raises where ranks get stuck
    for rank, actions in enumerate(ours.order):
        computed = [str(action) for action in simulated[rank] if action is not None and action.is_compute_op]
        assert computed == [str(action) for action in actions]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", *V_SHAPED])
def test_torch_reads_our_csv(name, tmp_path):
    ours = generate(name, 4, 9)
    (tmp_path / "ours.csv").write_text(to_csv(ours))
    theirs = build("looped-bfs", 4, 9, ours.num_stages // 4)
    theirs._load_csv(str(tmp_path / "ours.csv"))
    assert {rank: list(map(str, actions)) for rank, actions in theirs.pipeline_order.items()} == {
        rank: list(map(str, actions)) for rank, actions in enumerate(ours.order)
    }


def test_a_deadlock_that_torchs_lowering_refuses_is_one_for_us_too():
    order = [list(actions) for actions in generate("1f1b", 2, 2).order]
    order[0] = [order[0][index] for index in (0, 2, 1, 3)]  # rank 0: 0F0 0B0 0F1 0B1
    order[1] = [order[1][index] for index in (0, 2, 1, 3)]  # rank 1: 1F0 1F1 1B0 1B1
    broken = Schedule("broken", 2, (0, 1), tuple(map(tuple, order)))
    torch_schedules._validate_schedule(to_torch(order), 2, 2, 2)  # does not look across ranks
    with pytest.raises(AssertionError, match="can't schedule"):
        torch_schedules._add_send_recv(to_torch(order), lambda stage: stage, 2)
    assert [fault.code for fault in faults(broken)] == ["deadlock"]
