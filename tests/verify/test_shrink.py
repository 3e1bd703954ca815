"""A recipe made small keeps what layouts divide: what is legal stays legal, what is refused stays refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.recipe import Layout, load, problems
from drumline.recipe.layout import can_deal_heads
from drumline.verify.shrink import common_batch, shrink, with_batch

DEGREE = st.sampled_from((1, 2, 3, 4))
LAYOUTS = st.builds(
    Layout,
    pp=DEGREE,
    dp=st.sampled_from((1, 2)),
    fsdp=st.sampled_from((1, 2, 4)),
    cp=DEGREE,
    tp=DEGREE,
    ep=st.sampled_from((1, 2, 4)),
    cp_method=st.sampled_from(("ring", "gather", "ulysses")),
    pp_schedule=st.sampled_from(("1f1b", "zbv", "interleaved-1f1b")),
)
NAMES = ("llama3-debug", "llama3-8b", "qwen3-0.6b", "qwen3-30b-a3b", "deepseek-v3", "deepseek-v3-debug")


def of_layout(recipe):
    return sorted(p.code for p in problems(recipe) if p.key.startswith(("layout", "model")))


@settings(max_examples=60)
@given(st.sampled_from(NAMES), LAYOUTS)
def test_a_layout_is_legal_for_the_small_model_just_where_it_is_for_the_full_one(name, layout):
    full = load(name).model_copy(update={"layout": layout})
    (small,) = shrink(full, [layout]).recipes
    before = of_layout(with_batch(full, common_batch([layout])))
    assert (not of_layout(small)) == (not before), (before, of_layout(small))


@settings(max_examples=60)
@given(LAYOUTS, LAYOUTS)
def test_heads_vocabulary_and_layers_answer_as_the_full_ones_do(first, second):
    full = load("llama3-8b")
    small = shrink(full, [first, second]).recipes[0]
    for layout in (first, second):
        assert full.model.vocab_size % layout.tp == small.model.vocab_size % layout.tp
        heads = [(model.num_heads // layout.tp, model.num_kv_heads // layout.tp) for model in (full.model, small.model)]
        dealt = [can_deal_heads(max(1, h), max(1, g), layout.ulysses_degree) for h, g in heads]
        assert dealt[0] == dealt[1]
        stages = layout.num_stages
        assert (full.model.num_layers % stages == 0) == (small.model.num_layers % stages == 0)


def test_a_huge_model_becomes_tiny_and_says_what_was_kept():
    layouts = [Layout(tp=8), Layout(pp=4)]
    small = shrink(load("llama3-405b"), layouts)
    model = small.recipes[0].model
    assert (model.num_layers % 4, model.num_heads % 8, model.num_kv_heads) == (126 % 4, 0, 8)
    assert model.dim * model.num_layers < 1000
    assert any(line.startswith("num_layers 126 -> ") and "2 over" in line for line in small.kept), small.kept


@pytest.mark.parametrize("name", ["uneven", "even"])
def test_an_uneven_vocabulary_stays_uneven(name):
    size = 128_259 if name == "uneven" else 128_256
    full = load("llama3-8b", [f"model.vocab_size={size}"])
    (small,) = shrink(full, [Layout(tp=4)]).recipes
    assert small.model.vocab_size % 4 == size % 4
    assert small.model.vocab_size < 100


def test_every_recipe_of_a_set_of_layouts_shares_one_batch():
    recipes = shrink(load("llama3-debug"), [Layout(dp=3), Layout(pp=2), Layout(fsdp=4)]).recipes
    assert len({recipe.data.global_batch for recipe in recipes}) == 1
    for recipe in recipes:
        assert recipe.data.global_batch % (recipe.layout.data_degree * recipe.data.micro_batch) == 0
        assert recipe.data.global_batch // recipe.layout.data_degree // recipe.data.micro_batch >= 2
