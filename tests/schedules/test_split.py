"""Layers cut into stages: the largest stage is the smallest that any cut gives."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.planner import flops_per_token, stage_layers
from drumline.planner.stages import layer_flops
from drumline.recipe import load
from drumline.recipe.errors import DrumlineError
from drumline.schedules import split, split_layers


def all_cuts(num_layers, num_stages):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(range(a, b) for a, b in zip((0, *cuts), (*cuts, num_layers), strict=True))


def stage_costs(cut, costs, embedding, output):
    found = [sum(costs[layer] for layer in layers) for layers in cut]
    found[0] += embedding
    found[-1] += output
    return found


COSTS = st.lists(st.integers(0, 50), min_size=1, max_size=9)


def assert_best(costs, num_stages, embedding, output):
    found = split_layers(costs, num_stages, embedding_cost=embedding, output_cost=output)
    every = list(all_cuts(len(costs), num_stages))
    assert found in every
    worst = min(max(stage_costs(cut, costs, embedding, output)) for cut in every)
    own = stage_costs(found, costs, embedding, output)
    assert max(own) == worst
    even = min(
        sum(cost**2 for cost in stage_costs(cut, costs, embedding, output))
        for cut in every
        if max(stage_costs(cut, costs, embedding, output)) == worst
    )
    assert sum(cost**2 for cost in own) == even


@given(costs=COSTS, embedding=st.integers(0, 100), output=st.integers(0, 100), data=st.data())
def test_no_cut_has_a_smaller_largest_stage(costs, embedding, output, data):
    assert_best(costs, data.draw(st.integers(1, len(costs))), embedding, output)


def test_the_comparison_catches_an_output_that_weighs_nothing(monkeypatch):
    right = split_layers
    monkeypatch.setitem(globals(), "split_layers", lambda *args, output_cost, **options: right(*args, **options))
    with pytest.raises(AssertionError):
        assert_best([1, 1, 1, 1], 2, 0, 2)


def test_even_costs_are_cut_evenly():
    assert [len(layers) for layers in split_layers([1.0] * 126, 16, embedding_cost=1.0, output_cost=1.0)] == [
        7, *[8] * 14, 7
    ]  # fmt: skip


def test_more_stages_than_layers_are_refused():
    with pytest.raises(DrumlineError, match="2 layers cannot be cut into 3 stages"):
        split_layers([1, 1], 3)
    assert split.split_layers is split_layers


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b"])
def test_the_flops_of_layers_and_output_are_those_of_the_model(name):
    model = load(name, []).model
    costs, output = layer_flops(model, 4096)
    assert len(costs) == model.num_layers
    assert sum(costs) + output == flops_per_token(model, 4096).total


def test_dense_layers_and_layers_with_experts_weigh_what_they_cost():
    moe = {"num_experts": 64, "experts_per_token": 8, "expert_hidden_dim": 1024, "num_dense_layers": 6}
    overrides = [f"model.moe.{key}={value}" for key, value in moe.items()]
    model = load("llama3-debug", ["model.num_layers=12", "model.family=qwen3", "model.qk_norm=true", *overrides]).model
    dense, sparse = layer_flops(model, 256)[0][0], layer_flops(model, 256)[0][-1]
    assert sparse > 3 * dense
    assert len(stage_layers(model, 256, 2)[0]) > 7
