"""Dotted overrides, `layout.tp=4`: read from the command line and laid over the tree of a recipe's tables.

A value is read as TOML (`3e-4`, `true`, `["a", "b"]`), and as bare text where it is no TOML or where the key holds
text. A table is merged into what is there; a list is replaced, and its elements are reached by number
(`data.sources.0.weight=2`). A layout string replaces all degrees and leaves `layout.zero` alone.
"""

import re
import tomllib
from collections.abc import Sequence
from typing import Any

from drumline.recipe.keys import is_text, is_within
from drumline.recipe.layout import AXES, MAX_DEGREE, Layout, LayoutError, parse
from drumline.recipe.problem import ABSENT, Problem

Tree = dict[str, Any]

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ELEMENT = re.compile(r"data\.sources\.([0-9]+)(?:\.|$)")


def apply(tree: Tree, overrides: Sequence[str]) -> tuple[Tree, list[Problem]]:
    """Lays overrides over a tree, one after another.

    Args:
        tree: the recipe's tables, as TOML gives them.
        overrides: `key=value` each.

    Returns:
        The new tree, and what could not be read. `tree` itself is left as it is.
    """
    problems = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not _KEY.fullmatch(key.strip()):
            rule = f"{text!r} is no override; an override is a dotted key, = and a value, such as run.steps=30"
            problems.append(Problem("override-syntax", "", ABSENT, rule))
            continue
        key = key.strip()
        problems = [problem for problem in problems if not is_within(problem.key, key)]  # what is replaced does no harm
        if (index := _ELEMENT.match(key)) and not _reaches(index[1], elements := _elements(tree)):
            rule = f"names no element: data.sources has {len(elements)}, so the next is data.sources.{len(elements)}"
            problems.append(Problem("override-index", key, value, rule))
            continue
        edit = read_value(key, value)
        for part in reversed(key.split(".")):
            edit = {part: edit}
        tree, found = merge(tree, edit)
        problems += found
    return tree, problems


def read_value(key: str, text: str) -> Any:
    """Reads the right side of an override.

    Args:
        key: the key it is for.
        text: what was typed.

    Returns:
        The value as TOML types it, or the text itself.
    """
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    if document.keys() != {"value"} or (is_text(key) and not isinstance(document["value"], str)):
        return text.strip()
    return document["value"]


def merge(base: Tree, edit: Tree) -> tuple[Tree, list[Problem]]:
    """Lays one tree over another: tables merge, all else is replaced.

    Args:
        base: what is there.
        edit: what is laid over it.

    Returns:
        The merged tree, and what is wrong with layout strings in `edit`. Neither input is changed.
    """
    edit, problems = _spell_out(edit)
    return _merge(base, edit, ""), problems


def drop(tree: Tree, key: str) -> Tree:
    """The tree without a dotted key; without all of a list, when the key is inside of one."""
    name, _, rest = key.partition(".")
    inner: Any = tree.get(name)
    if rest and isinstance(inner, dict) and (kept := drop(inner, rest)):
        return {**tree, name: kept}
    return {other: value for other, value in tree.items() if other != name}


def _merge(base: Any, edit: Any, key: str) -> Any:
    if key == "data.sources" and isinstance(edit, dict) and edit and all(name.isdigit() for name in edit):
        return _edit_elements(base, edit, key)
    if not isinstance(edit, dict):
        return edit
    merged = dict(base) if isinstance(base, dict) else {}
    for name, value in edit.items():
        merged[name] = _merge(merged.get(name), value, f"{key}.{name}" if key else name)
    return merged


def _elements(tree: Tree) -> list[Any]:
    data = tree.get("data")
    sources = data.get("sources") if isinstance(data, dict) else None
    return sources if isinstance(sources, list) else [None]


def _reaches(index: str, elements: list[Any]) -> bool:
    return len(index) <= 9 and int(index) <= len(elements)


def _edit_elements(base: Any, edit: Tree, key: str) -> Any:
    elements = list(base) if isinstance(base, list) else [{"path": "stdlib"}]  # what a recipe without sources has
    for name, value in edit.items():
        index = int(name)
        elements[index : index + 1] = [_merge(elements[index] if index < len(elements) else {}, value, f"{key}.*")]
    return elements


def _spell_out(tree: Tree) -> tuple[Tree, list[Problem]]:
    """Short forms in their long form: a layout string as a table, a source's path as a table in a list."""
    tree = dict(tree)
    problems = []
    if isinstance(tree.get("layout"), str):
        try:
            tree["layout"] = dict.fromkeys(AXES, 1) | parse(tree["layout"])
        except LayoutError as error:
            problems.append(layout_problem(tree.pop("layout"), error))
    if isinstance(data := tree.get("data"), dict) and "sources" in data:
        sources = data["sources"]
        if isinstance(sources, str) or (isinstance(sources, dict) and not all(name.isdigit() for name in sources)):
            sources = [sources]
        if isinstance(sources, list):
            sources = [{"path": source} if isinstance(source, str) else source for source in sources]
        tree["data"] = {**data, "sources": sources}
    return tree, problems


def layout_problem(text: str, error: LayoutError) -> Problem:
    """What is wrong with a layout string, with the layout that its readable parts make; of one rank without any."""
    parts = dict(re.findall(r"(pp|dp|fsdp|cp|tp|ep)\s*[=:x*_-]?\s*0*([1-9]\d{0,9})", text.lower()))
    guess = ".".join(axis + degree for axis, degree in parts.items() if int(degree) <= MAX_DEGREE) or str(Layout())
    return Problem("layout-syntax", "layout", text, f"cannot be read: {error}", (guess,), f"layout={guess}")
