"""What pydantic says about wrong types, ranges, choices and unknown keys, as problems in the house's form."""

import difflib
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from drumline.recipe.keys import find, suggest
from drumline.recipe.layout import LayoutError
from drumline.recipe.overrides import Tree, layout_problem
from drumline.recipe.problem import ABSENT, UNKNOWN_KEY, Problem, override, show
from drumline.recipe.sections import Recipe

# Choices that a later version will have: they get a better answer than "must be one of".
_LATER = {
    "precision.compute": ("fp16", "fp8", "mxfp8", "nvfp4"),
    "precision.reduce": ("bf16",),
    "optimizer.name": ("muon",),
}
_TYPES = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "dict_type": "must be a table",
}
_BOUNDS = {
    "greater_than": ("gt", "must be more than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}


def form(tree: Tree) -> tuple[Recipe | None, list[Problem]]:
    """Builds the recipe of a tree.

    Args:
        tree: the recipe's tables.

    Returns:
        The recipe, or None and every fault of form.
    """
    broken = [
        Problem("wrong-type", key, value, "must be text, but has bytes that are no Unicode")
        for key, value in _leaves(tree, "")
        if isinstance(value, str) and not value.isascii() and re.search("[\ud800-\udfff]", value)
    ]
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        return None, broken + convert(error)
    return (None, broken) if broken else (recipe, [])


def convert(error: ValidationError) -> list[Problem]:
    """Every fault that pydantic found.

    Args:
        error: from validating a `Recipe`.

    Returns:
        One problem for each fault, in the order of the sections; one for each key of a table that is unknown.
    """
    problems = []
    for fault in error.errors(include_url=False):
        key = ".".join(_part(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            problems += [_unknown_key(leaf, value) for leaf, value in _leaves(fault["input"], key)]
        else:
            problems.append(_convert(fault, key))
    return problems


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{_part(name)}" if key else _part(name))
    else:
        yield key, value


def _part(name: int | str) -> str:
    """A part of a dotted key; quoted where TOML would quote it, so that an empty or spaced one is seen."""
    return str(name) if isinstance(name, int) or re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _convert(fault: Any, key: str) -> Problem:
    kind, value, context = fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "missing":
        return Problem("missing-key", key, ABSENT, "is missing")
    if kind == "literal_error":
        return _no_choice(key, value)
    if key == "layout" and kind in _TYPES:
        return Problem("layout-syntax", key, value, "must be a layout string such as dp2.fsdp4, or a table of degrees")
    if kind in _TYPES:
        return _with_remedy("wrong-type", key, value, _TYPES[kind], _same_in_type(kind, value, key))
    if kind in _BOUNDS:
        name, rule = _BOUNDS[kind]
        nearest = (context[name],) if name in ("ge", "le") else _default(key)
        return _with_remedy("out-of-range", key, value, f"{rule} {show(context[name])}", nearest)
    if kind == "finite_number":
        return _with_remedy("not-finite", key, value, "must be a finite number", _default(key))
    if isinstance(context.get("error"), LayoutError):
        return layout_problem(value, context["error"])
    return Problem("invalid", key, value, f"is refused: {fault['msg']}")


def _unknown_key(key: str, value: Any) -> Problem:
    if key == "extends":
        return Problem("extends-override", key, value, "can be said only in a file, in its first lines")
    found = suggest(key)
    is_plain = isinstance(value, bool | int | float | str)
    return Problem(
        UNKNOWN_KEY,
        key,
        value if is_plain else ABSENT,
        "is no key of a recipe",
        tuple(found),
        override(found[0], value) if found and is_plain else "",
    )


def _no_choice(key: str, value: Any) -> Problem:
    info = find(key)
    choices = getattr(info.annotation, "__args__", ()) if info else ()
    if value in _LATER.get(key, ()):
        rule = f"cannot run yet; what runs today: {', '.join(show(choice) for choice in choices)}"
        return _with_remedy("not-yet", key, value, rule, choices[-1:])
    close = difflib.get_close_matches(str(value).lower(), [str(choice) for choice in choices], n=2, cutoff=0.5)
    nearest = tuple(choice for choice in choices if str(choice) in close) or _default(key)
    return _with_remedy(
        "not-a-choice", key, value, f"must be one of {', '.join(show(choice) for choice in choices)}", nearest
    )


def _with_remedy(code: str, key: str, value: Any, rule: str, nearest: tuple[Any, ...]) -> Problem:
    return Problem(code, key, value, rule, nearest, override(key, nearest[0]) if nearest else "")


def _default(key: str) -> tuple[Any, ...]:
    info = find(key)
    plain = info is not None and isinstance(info.default, bool | int | float | str) and info.default != ""
    return (info.default,) if info is not None and plain else ()


def _same_in_type(kind: str, value: Any, key: str) -> tuple[Any, ...]:
    """The same value in the type that is wanted, where there is one; else the default."""
    try:
        if kind.startswith("int") and not isinstance(value, bool):
            number = float(value)
            return (math.floor(number),) if math.isfinite(number) and 1 <= abs(number) < 2**53 else _default(key)
        if kind == "float_type" and not isinstance(value, bool) and math.isfinite(float(value)):
            return (float(value),)
        if kind == "bool_type":
            words = {"1": True, "0": False, "yes": True, "no": False, "on": True, "off": False}
            words |= {"true": True, "false": False}
            return (words[str(value).lower()],)
        if kind == "string_type" and isinstance(value, int | float) and not isinstance(value, bool):
            return (str(value),)
    except (TypeError, ValueError, KeyError, OverflowError):
        pass
    return _default(key)
