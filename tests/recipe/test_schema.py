"""The JSON Schema says what `load` reads; `jsonschema` is the judge."""

import tomllib
from pathlib import Path

import jsonschema
import pytest

import drumline.recipe
from drumline.recipe import builtin_names, load, schema, to_toml
from drumline.recipe.keys import keys

BUILTIN = Path(drumline.recipe.__file__).parent / "builtin"


def accepts(document):
    return jsonschema.Draft202012Validator(schema()).is_valid(document)


def test_the_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("name", builtin_names())
def test_built_in_recipes_follow_the_schema_as_written_and_as_resolved(name):
    assert accepts(tomllib.loads((BUILTIN / f"{name}.toml").read_text()))
    assert accepts(tomllib.loads(to_toml(load(name))))


@pytest.mark.parametrize(
    "document",
    [
        {"extends": "llama3-8b"},
        {"layout": "dp2.fsdp4"},
        {"layout": {"dp": 2}},
        {"data": {"sources": "stdlib"}},
        {"data": {"sources": ["a", {"path": "b", "weight": 2}]}},
        {"model": {"rope_scaling": "none"}},
    ],
)
def test_short_forms_are_in_the_schema(document, tmp_path):
    assert accepts(document)


@pytest.mark.parametrize(
    "document",
    [
        {"run": {"step": 3}},
        {"run": {"steps": -1}},
        {"run": {"steps": "3"}},
        {"layout": "dp2xfsdp4"},
        {"layout": "dp0"},
        {"precision": {"compute": "fp17"}},
        {"model": {"rope_scaling": "some"}},
        {"extends": 3},
    ],
)
def test_what_load_refuses_the_schema_refuses(document):
    assert not accepts(document)


@pytest.mark.parametrize("key", keys())
def test_every_key_is_described(key):
    assert (keys()[key].description or "").endswith((".", ")")) or key == "data.sources"
