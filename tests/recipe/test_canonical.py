"""One spelling: TOML that reads back, digests, and differences."""

import tomllib
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.recipe import Recipe, builtin_names, diff, digest, full_digest, load, to_toml
from drumline.recipe.canonical import ADDED_LATER, NOT_MATHS, flat, is_maths
from drumline.recipe.keys import keys
from drumline.recipe.problem import ABSENT

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@pytest.mark.parametrize("name", builtin_names())
def test_toml_of_a_recipe_reads_back_equal(name):
    recipe = load(name)
    assert Recipe.model_validate(tomllib.loads(to_toml(recipe))) == recipe


@settings(max_examples=200)
@given(
    text=TEXT,
    path=TEXT,
    number=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    seed=st.integers(0, 2**63 - 1),
    weight=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
)
def test_toml_of_any_text_and_number_reads_back_equal(text, path, number, seed, weight):
    recipe = Recipe.model_validate(
        {
            "name": text,
            "run": {"name": text, "seed": seed},
            "optimizer": {"lr": number},
            "data": {"sources": [{"path": path, "weight": weight}, text]},
        }
    )
    assert Recipe.model_validate(tomllib.loads(to_toml(recipe))) == recipe


def test_the_digest_of_a_recipe_is_stable():
    assert digest(Recipe()) == digest(Recipe())
    assert len(digest(Recipe())) == 64


def _other(info: Any) -> Any:
    """A value of a field's type that is not its default; None for a section, a list or a choice of one."""
    kind = info.annotation
    if get_origin(kind) is not None and all(isinstance(choice, str | int) for choice in get_args(kind)):
        return next((choice for choice in get_args(kind) if choice != info.default), None)
    if kind is bool:
        return not info.default
    if kind is int:
        return info.default + 1
    if kind is float:
        return info.default / 2 + 0.03
    return "other" if kind is str else None


PLAIN = [key for key in keys() if "*" not in key and "rope_scaling." not in key and _other(keys()[key]) is not None]


@pytest.mark.parametrize("key", PLAIN)
def test_a_digest_changes_with_a_key_of_the_maths_and_with_no_other(key):
    value = _other(keys()[key])
    tree: dict = {}
    node = tree
    *sections, leaf = key.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[leaf] = value
    is_optional = key.startswith(("model.moe.", "model.mla.", "model.yarn."))
    base = Recipe.model_validate({"model": {sections[1]: {}}} if is_optional else {})
    changed = Recipe.model_validate(tree)
    assert (digest(changed) != digest(base)) == is_maths(key)
    assert full_digest(changed) != full_digest(base)
    assert [row.key for row in diff(base, changed)] == [key]


def test_a_dense_recipe_has_the_digest_that_it_had_before_there_were_experts():
    written_down = "df94d2e687609651867668a069d024d3b9f9d94ef3a92facf450806940f6285b"  # llama3-8b, at 0.1.0
    assert digest(load("llama3-8b")) == written_down
    assert digest(load("llama3-8b", ["model.moe.num_experts=8"])) != written_down
    assert digest(load("llama3-8b", ["model.moe.num_experts=8", "model.moe=none"])) == written_down


def test_a_key_added_later_has_its_default_there():
    for key, value in ADDED_LATER.items():
        assert flat(Recipe())[key] == value


def test_a_layout_never_changes_the_digest():
    assert digest(load("llama3-debug", ["layout=dp2.fsdp2"])) == digest(load("llama3-debug"))


def test_every_key_that_is_left_out_of_the_maths_exists():
    assert not {key for key in NOT_MATHS if key not in keys()}


def test_diff_of_a_recipe_with_itself_is_empty():
    assert diff(load("llama3-8b"), load("llama3-8b")) == []


def test_diff_names_what_only_one_recipe_has():
    rows = {row.key: row for row in diff(load("llama3-8b"), load("llama3-8b", ["data.sources=['a', 'b']"]))}
    assert rows["data.sources.1.path"].first is ABSENT
    assert rows["data.sources.1.path"].second == "b"
    assert rows["data.sources.0.path"].is_maths


def test_flat_has_every_value():
    assert set(flat(load("llama3-8b"))) == {
        key.replace("*", "0")
        for key in keys()
        if key in ("name", "model.rope_scaling.factor")
        or (
            "." in key
            and key not in ("data.sources", "model.rope_scaling")
            and not key.startswith(("model.moe.", "model.mla.", "model.yarn."))
        )
    }
