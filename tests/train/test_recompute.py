"""The check for silent data corruption: it finds a flipped bit and its rank, under any layout, and nothing else."""

import ctypes

import pytest
import torch
from tests.train.runs import rows, steps, train_here
from tests.train.test_experts import EXPERTS
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.recipe import RecipeError, check, load
from drumline.train.recompute import explain
from drumline.train.witness import Difference, Witness

KEYS = ("run.steps=2", "run.validation_batches=0", "checkpoint.at_end=false", "resilience.replay_every=1")
MOE = (*EXPERTS, "layout=fsdp2.ep2")
QUICK = [
    ("layout=fsdp2", "memory.activation_checkpointing=full"),
    ("layout=pp2", "layout.pp_schedule=zb-h1"),
    MOE,
]
LAYOUTS = [
    *QUICK,
    *(
        pytest.param(keys, marks=pytest.mark.slow)
        for keys in (
            ("layout=dp2", "model.dropout=0.1"),
            ("layout=tp2", "precision.compute=bf16"),
            ("layout=cp2", "memory.activation_checkpointing=selective"),
            ("layout=dp2.tp2", "layout.sequence_parallel=false"),
        )
    ),
]


class Fault(TorchDispatchMode):
    """A machine that flips the lowest bit of the first element, once, at the n-th call of an operator.

    `where` says of what: of the result, before anybody sees it; or of an input, after the operator has read it.
    """

    def __init__(self, operator: str, nth: int, where: str):
        super().__init__()
        self.operator, self.left, self.where = operator, nth, where

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(self.operator):
            self.left -= 1
            if self.left == 0:
                tensor = (result[0] if isinstance(result, tuple) else result) if self.where == "result" else args[0]
                flip(tensor)
        return result


def flip(tensor: torch.Tensor) -> None:
    """Flips a bit behind torch's back."""
    byte = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_ubyte))
    byte[0] ^= 1


def break_rank(rank: int, operator: str, nth: int = 1, where: str = "result") -> None:
    """Makes one rank of this world faulty in the second run of a check."""
    from drumline.comm import read_place
    from drumline.train import recompute

    if read_place().rank != rank:
        return
    right, calls = recompute._observe, []

    def observe(*args):
        calls.append(1)
        if len(calls) != 2:
            return right(*args)
        with Fault(operator, nth, where):
            return right(*args)

    recompute._observe = observe


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_nothing_is_found_where_nothing_is_wrong_and_the_run_keeps_its_bits(layout, tmp_path):
    train_here(tmp_path / "checked", *KEYS, *layout)
    train_here(tmp_path / "plain", *KEYS, *layout, "resilience.replay_every=0")
    assert steps(tmp_path / "checked") == steps(tmp_path / "plain")
    found = rows(tmp_path / "checked", "replay")
    assert [row["step"] for row in found] == [1, 2]
    assert all(row["num_digests"] > 100 for row in found)


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_a_flipped_bit_is_found_and_its_rank_alone_is_named(layout, tmp_path):
    with pytest.raises(AssertionError) as caught:
        train_here(tmp_path, *KEYS, *layout, before=lambda: break_rank(1, "aten.mm", 3))
    text = str(caught.value)
    assert "step 1: a micro-batch that was computed twice gave different bits" in text
    assert "rank 1 on " in text
    assert "aten::mm in the " in text
    assert "gave other results for the same inputs" in text
    assert "rank 0 on " not in text


def test_memory_that_changes_is_told_from_a_wrong_result(tmp_path):
    # The input of the first product is kept for the backward, which finds another one there.
    with pytest.raises(AssertionError, match=r"rank 1 on .* read what had changed in memory"):
        train_here(tmp_path, *KEYS, "layout=dp2", before=lambda: break_rank(1, "aten.mm", 1, "input"))


def test_what_changes_on_its_way_is_laid_at_no_ranks_door(tmp_path):
    with pytest.raises(AssertionError, match="no rank computed otherwise: what was received changed, at rank"):
        train_here(
            tmp_path, *KEYS, "layout=tp2", before=lambda: break_rank(1, "_c10d_functional.wait_tensor", 2, "result")
        )


@pytest.mark.parametrize("bit", [0, 15, 31])
def test_a_digest_tells_any_bit(bit):
    def observe(flipped: bool):
        x = torch.arange(1000.0)
        with Witness() as witness:
            y = x * 2
            if flipped:
                pointer = ctypes.cast(y.data_ptr() + 4 * 777, ctypes.POINTER(ctypes.c_uint32))
                pointer[0] ^= 1 << bit
            y.exp()
        return witness.testimony()

    assert observe(False).first_difference(observe(False)) is None
    assert observe(False).first_difference(observe(True)) == Difference(2, "aten::exp", "input")


def test_other_operators_the_second_time_are_a_difference():
    def observe(double: bool):
        with Witness() as witness:
            x = torch.ones(3) + 1
            x = x.exp() if double else x.log()
        return witness.testimony()

    found = observe(False).first_difference(observe(True))
    assert found is not None
    assert found.what == "aten::log the first time, aten::exp the second"


def test_memory_that_nobody_has_written_is_no_difference():
    def observe(value: float):
        with Witness() as witness:
            x = torch.empty(8)
            with torch.utils._python_dispatch._disable_current_modes():
                x.fill_(value)  # what happened to lie there
            x.copy_(torch.ones(8))
            (x + 1).sum()
        return witness.testimony()

    assert observe(1.0).first_difference(observe(2.0)) is None


def test_every_faulty_rank_is_named_and_nobody_else():
    said = Difference(4, "aten::mm in the forward of micro-batch 0", "result")
    heard = Difference(9, "aten::add in the forward of micro-batch 0", "received")
    text = explain(8, [("a", heard), ("b", said), ("c", None), ("d", said)])
    assert "rank 1 on b" in text
    assert "rank 3 on d" in text
    assert "on a" not in text
    assert "on c" not in text


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (["numerics.deterministic=false"], "replay-deterministic"),
        (["run.compile=true"], "replay-compile"),
        (["model.attention=flex"], "replay-flex"),
        ([*EXPERTS, "model.moe.capacity_factor=1.0"], "replay-capacity"),
    ],
)
def test_what_the_check_cannot_follow_is_refused(changes, code):
    recipe = load("llama3-debug", ["resilience.replay_every=5", *changes])
    with pytest.raises(RecipeError, match=code):
        check(recipe, world_size=1)
