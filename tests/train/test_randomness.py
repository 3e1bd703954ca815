"""Dropout and stochastic rounding are functions of logical places: no layout, recomputation or restart changes them,
and nothing draws from a generator that the process shares.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.train.runs import assert_same_bits, rows, save_when_loaded, steps, tensors, train_here
from tests.train.test_experts import EXPERTS

KEYS = (
    "run.steps=4",
    "model.dropout=0.2",
    "model.num_layers=4",
    "optimizer.state_dtype=bf16",
    "run.validation_batches=0",
    "checkpoint.at_end=false",
)
FULL = "memory.activation_checkpointing=full"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    run = tmp_path_factory.mktemp("one")
    train_here(run, *KEYS)
    return [row["loss"] for row in rows(run, "step")]


@pytest.mark.parametrize(
    "overrides",
    [
        ("layout=dp2.fsdp2", "layout.zero=1", FULL),
        ("layout=tp2", "layout.sequence_parallel=false"),
        ("layout=fsdp2.tp2", "memory.activation_checkpointing=selective"),
        ("layout=cp2.tp2", "layout.cp_method=ulysses"),
        ("layout=pp2", "layout.pp_schedule=interleaved-1f1b", FULL),
        pytest.param(("layout=pp2.fsdp2", "layout.pp_schedule=zb-h1"), marks=pytest.mark.slow),
        pytest.param(("layout=pp2", "layout.pp_schedule=dualpipev"), marks=pytest.mark.slow),
        ("data.micro_batch=4",),
    ],
    ids=" ".join,
)
def test_every_layout_drops_the_same_elements(overrides, one_rank, tmp_path):
    train_here(tmp_path, *KEYS, *overrides)
    assert [row["loss"] for row in rows(tmp_path, "step")] == pytest.approx(one_rank, rel=1e-5)


@pytest.mark.parametrize("overrides", [("model.dropout=0",), ("run.seed=0", "model.dropout=0.21")], ids=" ".join)
def test_losses_would_tell_other_masks_apart(overrides, one_rank, tmp_path):
    train_here(tmp_path, *KEYS, *overrides)
    assert rows(tmp_path, "step")[-1]["loss"] != pytest.approx(one_rank[-1], rel=1e-4)


def test_experts_and_their_layouts_drop_the_same_elements(tmp_path):
    keys = (*EXPERTS, "run.steps=3", "model.dropout=0.2", "checkpoint.at_end=false", "run.validation_batches=0")
    train_here(tmp_path / "one", *keys)
    train_here(tmp_path / "ep", *keys, "layout=fsdp2.ep2")
    losses, expected = ([row["loss"] for row in rows(tmp_path / run, "step")] for run in ("ep", "one"))
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("overrides", [("layout=dp2",), ("layout=fsdp2.tp2", FULL)], ids=" ".join)
def test_a_run_that_goes_on_from_a_commit_has_the_bits_of_one_that_ran_through(overrides, tmp_path):
    keys = (*KEYS, *overrides, "checkpoint.at_end=true", "checkpoint.every=2")
    train_here(tmp_path / "through", *keys)
    train_here(tmp_path / "stopped", *keys, kill_after=3)
    train_here(tmp_path / "stopped", *keys)
    assert steps(tmp_path / "stopped") == steps(tmp_path / "through")
    last = "checkpoints/step-00000004"
    assert_same_bits(tensors(tmp_path / "stopped" / last), tensors(tmp_path / "through" / last))


def test_bf16_states_are_taken_up_bit_for_bit_by_another_layout(tmp_path):
    run, keys = tmp_path / "run", (*KEYS, "checkpoint.at_end=true")
    train_here(run, *keys, "layout=fsdp2.tp2")
    commit = tensors(run / "checkpoints/step-00000004")
    assert {x.dtype for name, x in commit.items() if name.startswith("optimizer.")} == {torch.bfloat16}
    further = (*keys, "run.steps=5", "checkpoint.every=0", "checkpoint.at_end=false")
    for layout in ("dp1", "pp2.fsdp2", "dp2.tp2"):
        copy = tmp_path / layout
        train_here(run, *further, f"layout={layout}", before=lambda copy=copy: save_when_loaded(copy))
        assert_same_bits(tensors(copy / "step-00000004"), commit)


def states() -> tuple:
    return torch.get_rng_state().tolist(), [str(part) for part in np.random.get_state()], random.getstate()


def watch_generators(also: Callable[[], object]) -> None:
    """Makes a run of this process fail unless the shared generators are as they were when it began."""
    from drumline.train import run

    right, before = run.Loop, states()

    class Watched(right):
        def run(self):
            reason = super().run()
            also()
            assert states() == before, "drew from a shared generator"
            return reason

    run.Loop = Watched


EVERYTHING = (*KEYS, *EXPERTS, "data.num_workers=1", "checkpoint.at_end=true", "run.validation_batches=1")


def test_no_training_draws_from_a_shared_generator(tmp_path):
    train_here(tmp_path, *EVERYTHING, "layout=fsdp2", before=lambda: watch_generators(bool))


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(1)], ids=["random", "numpy", "torch"]
)
def test_a_training_that_draws_is_caught(draw, tmp_path):
    with pytest.raises(AssertionError, match="drew from a shared generator"):
        train_here(tmp_path, *KEYS, "run.steps=1", before=lambda: watch_generators(draw))
