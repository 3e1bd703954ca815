"""The built-in table holds: every row computes what one device computes. All of it is a long test."""

import os

import pytest

from drumline.recipe import DrumlineError, Layout, RecipeError, load
from drumline.verify import of_recipe, of_table, verify
from drumline.verify.matrix import ROWS, select

FEW = ("dense/dp1", "dense/dp2.cp2", "dense/fsdp2.tp2", "moe/fsdp2.ep2", "dense/pp2 zbv", "dense/tp2 bf16")


def all_hold(rows):
    chosen = of_table(rows)
    assert not chosen.refused
    results = list(verify(chosen.cases, max_ranks=4 * len(os.sched_getaffinity(0))))
    assert len(results) == len(rows)
    wrong = {
        f"{r.case.model}/{r.case.name}": (r.verdict.first_wrong, r.verdict.why) if r.verdict else r.failure
        for r in results
        if not r.ok
    }
    assert not wrong
    assert all(r.verdict.bitwise and not r.verdict.flips for r in results)


def test_some_rows_hold():
    all_hold([row for row in ROWS if row.name in FEW])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_row_holds():
    all_hold(ROWS)


def test_the_table_covers_axes_pairs_triples_schedules_methods_and_precisions():
    cases = of_table(ROWS).cases
    layouts = [case.recipe.layout for case in cases]
    assert len(ROWS) == len({row.name for row in ROWS}) >= 60
    axes = ("pp", "dp", "fsdp", "cp", "tp", "ep")
    split = [frozenset(axis for axis in axes if getattr(layout, axis) > 1) for layout in layouts]
    for axis in axes:
        alone = {axis} if axis != "ep" else {"ep", "fsdp"}
        degrees = {getattr(layout, axis) for layout, found in zip(layouts, split, strict=True) if found == alone}
        assert {2, 4} <= degrees, axis
        for other in axes:
            assert any({axis, other} <= found for found in split), (axis, other)
    for triple in (("dp", "tp", "pp"), ("fsdp", "tp", "cp"), ("fsdp", "ep", "pp"), ("tp", "cp", "pp")):
        assert any(set(triple) <= found for found in split), triple
    assert any({"fsdp", "tp", "cp", "pp"} <= found for found in split)
    assert {layout.num_ranks for layout in layouts} >= {2, 4, 8, 16}
    assert len({layout.pp_schedule for layout in layouts if layout.pp > 1}) == 7
    for has_documents in (True, False):
        methods = {c.recipe.layout.cp_method for c in cases if c.recipe.data.document_mask == has_documents}
        assert methods == {"ring", "gather", "ulysses", "ring_ulysses"}
    assert {case.recipe.memory.activation_checkpointing for case in cases} >= {"full", "selective"}
    assert {case.recipe.precision.compute for case in cases} == {"fp32", "bf16"}
    assert any(c.recipe.model.vocab_size % c.recipe.layout.tp for c in cases)


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(DrumlineError, match="matches no row"):
        select("nothing/*")


def test_a_layout_that_the_full_recipe_cannot_have_is_refused_with_its_numbers():
    with pytest.raises(RecipeError, match=r"layout\.tp = 3 does not divide model\.num_heads = 32"):
        of_recipe(load("llama3-8b"), [("tp3", Layout(tp=3))], "llama3-8b")
    with pytest.raises(DrumlineError, match=r"64 ranks.*\n  try: --layout dp2"):
        of_recipe(load("llama3-8b"), [("dp64", Layout(dp=64))], "llama3-8b")


def test_a_recipe_in_bf16_is_verified_in_fp32_too_and_its_experts_cannot_flip():
    chosen = of_recipe(
        load("qwen3-30b-a3b", ["memory.activation_checkpointing=full"]),
        [("fsdp2.ep2", Layout(fsdp=2, ep=2))],
        "qwen3-30b-a3b",
    )
    fp32, bf16 = (case.recipe for case in chosen.cases)
    assert (fp32.precision.compute, bf16.precision.compute) == ("fp32", "bf16")
    assert fp32.model.moe.experts_per_token < fp32.model.moe.num_experts
    assert bf16.model.moe.experts_per_token == bf16.model.moe.num_experts
