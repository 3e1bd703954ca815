"""What may change between a run and its continuation."""

import pytest

from drumline.recipe import load
from drumline.recipe.sections import RopeScaling, Source
from drumline.train.resume import differences


def keys_that_differ(*overrides, edit=lambda recipe: recipe):
    before = load("llama3-debug").model_dump(mode="json")
    return [key for key, _, _ in differences(before, edit(load("llama3-debug", list(overrides))))]


@pytest.mark.parametrize(
    "override", ["run.steps=7", "layout=dp2", "data.micro_batch=1", "checkpoint.every=1", "run.dir=/x", "layout.zero=1"]
)
def test_how_a_run_is_spread_cut_and_kept_may_change(override):
    assert keys_that_differ(override) == []


@pytest.mark.parametrize(
    "override", ["run.seed=1", "optimizer.lr=0.1", "data.global_batch=16", "precision.compute=bf16", "model.dim=128"]
)
def test_what_defines_its_maths_may_not(override):
    assert keys_that_differ(override) == [override.split("=")[0]]


def test_a_source_more_or_another_scaling_is_noticed():
    def with_source(recipe):
        sources = (*recipe.data.sources, Source(path="/more"))
        return recipe.model_copy(update={"data": recipe.data.model_copy(update={"sources": sources})})

    def with_scaling(recipe):
        model = recipe.model.model_copy(update={"rope_scaling": RopeScaling()})
        return recipe.model_copy(update={"model": model})

    assert "data.sources.1.path" in keys_that_differ(edit=with_source)
    assert any(key.startswith("model.rope_scaling") for key in keys_that_differ(edit=with_scaling))


def test_imported_weights_bind_the_models_shape_and_nothing_else():
    recipe = load("llama3-debug", ["run.seed=5"])
    before = {"model": recipe.model.model_dump(mode="json")}
    assert differences(before, recipe) == []
    other = load("llama3-debug", ["model.num_layers=3"])
    assert differences(before, other) == [("model.num_layers", 6, 3)]


def test_a_key_that_an_older_version_did_not_know_is_no_difference():
    before = load("llama3-debug").model_dump(mode="json")
    del before["optimizer"]["eps"]
    assert differences(before, load("llama3-debug")) == []


def test_experts_more_or_otherwise_trained_are_noticed():
    assert "model.moe.num_experts" in keys_that_differ("model.moe.num_experts=8")
    before = load("qwen3-moe-debug").model_dump(mode="json")
    after = load("qwen3-moe-debug", ["model.moe.balance=bias", "metrics.expert_load_every=0"])
    assert [key for key, _, _ in differences(before, after)] == ["model.moe.balance"]


def test_a_commit_older_than_experts_is_of_a_dense_model():
    before = load("llama3-debug").model_dump(mode="json")
    del before["model"]["moe"], before["metrics"]["expert_load_every"]
    assert differences(before, load("llama3-debug")) == []
    changed = [key for key, _, _ in differences(before, load("llama3-debug", ["model.moe.num_experts=8"]))]
    assert "model.moe.num_experts" in changed


def test_imported_experts_may_be_trained_in_any_way():
    recipe = load("qwen3-moe-debug")
    before = {"model": recipe.model.model_dump(mode="json", exclude={"moe": {"balance", "capacity_factor"}})}
    assert differences(before, load("qwen3-moe-debug", ["model.moe.balance=bias", "model.moe.capacity_factor=2"])) == []
    wider = load("qwen3-moe-debug", ["model.moe.num_experts=16"])
    assert [key for key, _, _ in differences(before, wider)] == ["model.moe.num_experts"]
