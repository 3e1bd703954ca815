"""Runs with spread experts: the run of one rank, and one that goes on bit for bit wherever it is taken."""

import functools

import pytest
from tests.train.runs import assert_same_bits, rows, save_when_loaded, tensors, train_here
from tests.train.test_experts import EXPERTS, KINDS, assert_same_run

from drumline.train.routing import RoutingTally

LAYOUTS = ("fsdp2.ep2", "cp2.ep2", "fsdp4.ep2", "fsdp4.ep4", "dp2.fsdp2.ep2")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    found = {}
    for kind, keys in KINDS.items():
        run = tmp_path_factory.mktemp(kind)
        train_here(run, *EXPERTS, *keys, "run.steps=6")
        found[kind] = rows(run, "step"), rows(run, "validation")
    return found


@pytest.mark.parametrize(
    ("layout", "kind", "overrides"),
    [
        *((layout, "bias", ()) for layout in LAYOUTS),
        *(pytest.param(layout, "aux_loss", (), marks=pytest.mark.slow) for layout in LAYOUTS),
        ("fsdp2.ep2", "capacity", ()),
        ("fsdp2.ep2", "bias", ("layout.zero=1", "data.micro_batch=2")),
        ("fsdp4.ep2", "bias", ("layout.zero=2",)),
        ("fsdp4.ep2", "aux_loss", ("memory.activation_checkpointing=full",)),
    ],
)
def test_losses_and_loads_are_those_of_one_rank(layout, kind, overrides, one_rank, tmp_path):
    train_here(tmp_path, *EXPERTS, *KINDS[kind], "run.steps=6", f"layout={layout}", *overrides)
    assert_same_run(rows(tmp_path, "step"), one_rank[kind][0])
    losses = [[row["loss"] for row in found] for found in (rows(tmp_path, "validation"), one_rank[kind][1])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after"), [("fsdp2.ep2", "dp1"), ("fsdp4.ep4", "cp2.ep2"), ("dp1", "fsdp4.ep2"), ("cp2.ep2", "fsdp2")]
)
@pytest.mark.parametrize("kind", [pytest.param("aux_loss", marks=pytest.mark.slow), "bias"])
def test_a_commit_is_taken_up_by_another_layout_bit_for_bit(before, after, kind, one_rank, tmp_path):
    keys = (*EXPERTS, *KINDS[kind], "run.steps=6")
    train_here(tmp_path, *keys, "checkpoint.every=3", "checkpoint.keep=9", f"layout={before}")
    written, again = tensors(tmp_path / "checkpoints" / "step-00000003"), tmp_path / "again"
    train_here(tmp_path, *keys, f"layout={after}", before=functools.partial(save_when_loaded, again))
    assert_same_bits(tensors(again / "step-00000003"), written)
    assert_same_run(rows(tmp_path, "step"), one_rank[kind][0])


@pytest.mark.parametrize("layout", ["fsdp2.ep2", "cp2.ep2"])
def test_a_killed_run_resumes_bit_for_bit(layout, tmp_path):
    through, killed = tmp_path / "through", tmp_path / "killed"
    keys = (*EXPERTS, *KINDS["bias"], "checkpoint.at_end=true", "run.steps=6", "checkpoint.every=3", f"layout={layout}")
    train_here(through, *keys)
    train_here(killed, *keys, kill_after=4)
    train_here(killed, *keys)
    assert_same_bits(*(tensors(run / "checkpoints" / "step-00000006") for run in (killed, through)))


@pytest.mark.parametrize("kind", ["aux_loss", "bias"])
def test_the_comparison_catches_counts_of_each_rank_alone(kind, one_rank, tmp_path, monkeypatch):
    right = RoutingTally.__init__
    monkeypatch.setattr(
        RoutingTally, "__init__", lambda self, model, _, **how: right(self, model, lambda counts, dtype: counts, **how)
    )
    train_here(tmp_path, *EXPERTS, *KINDS[kind], "run.steps=6", "layout=fsdp2.ep2")
    with pytest.raises(AssertionError):
        assert_same_run(rows(tmp_path, "step"), one_rank[kind][0])
