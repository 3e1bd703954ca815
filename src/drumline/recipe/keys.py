"""All keys that a recipe has, by dotted name, and what someone who wrote another one may have meant."""

import difflib
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drumline.recipe.sections import Recipe


@functools.cache
def keys() -> Mapping[str, FieldInfo]:
    """Every key of a recipe, sections included; a list's element is written as `*`, as in `data.sources.*.path`.

    Returns:
        Dotted key -> the field's type, default and description, in the order of the sections.
    """
    return types.MappingProxyType(dict(_walk(Recipe, "")))


def _walk(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in section.model_fields.items():
        yield prefix + name, info
        for inner, star in _sections_in(info.annotation):
            yield from _walk(inner, f"{prefix}{name}.{star}")


def _sections_in(annotation: Any, star: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, star
    elif origin := typing.get_origin(annotation):
        for part in typing.get_args(annotation):
            yield from _sections_in(part, "*." if origin is tuple else star)


def find(key: str) -> FieldInfo | None:
    """The field of a dotted key, where numbers stand for elements of a list; None when there is none."""
    return keys().get(".".join("*" if part.isdigit() else part for part in key.split(".")))


def is_within(key: str, section: str) -> bool:
    """Whether a dotted key is a section's, or the section itself."""
    return key == section or key.startswith(f"{section}.")


def is_text(key: str) -> bool:
    """Whether a key holds text, so that what is typed for it needs no quotes: a string or a choice of strings."""
    info = find(key)
    if info is None:
        return False
    choices = typing.get_args(info.annotation) if typing.get_origin(info.annotation) is typing.Literal else ()
    return info.annotation is str or any(isinstance(choice, str) for choice in choices)


def suggest(key: str) -> list[str]:
    """Known keys that someone who wrote `key` may have meant, best first.

    Args:
        key: a dotted key that is unknown.

    Returns:
        At most three keys: close names in the same section, then the same or a close name elsewhere.
    """
    section, _, leaf = key.rpartition(".")
    inside = ".".join("*" if part.isdigit() else part for part in section.split("."))
    if "*" in inside:  # an element of a list: only its own keys
        names = [name.removeprefix(f"{inside}.") for name in keys() if name.startswith(f"{inside}.")]
        return [f"{section}.{name}" for name in difflib.get_close_matches(leaf, names, n=2, cutoff=0.5)]
    known = [name for name in keys() if "*" not in name]
    leaves = {name: name.rpartition(".")[2] for name in known}
    siblings = {leaves[name]: name for name in known if name.rpartition(".")[0] == section}
    found = [siblings[name] for name in difflib.get_close_matches(leaf, siblings, n=2, cutoff=0.7)]
    found += [name for name in known if leaves[name] == leaf]
    if not found:
        found += difflib.get_close_matches(key, known, n=2, cutoff=0.75)
    if not found:
        close = difflib.get_close_matches(leaf, set(leaves.values()), n=1, cutoff=0.8)
        found += [name for name in known if leaves[name] in close]
    return list(dict.fromkeys(found))[:3]
