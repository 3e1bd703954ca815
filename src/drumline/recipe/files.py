"""Where a recipe's tables come from: a built-in recipe, a TOML file or a run's recipe.json, with what it extends."""

import difflib
import functools
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

from drumline.recipe.errors import DrumlineError, RecipeError
from drumline.recipe.overrides import Tree, merge
from drumline.recipe.problem import ABSENT, Problem

_BUILTIN = Path(__file__).parent / "builtin"
_MAX_BYTES = 1 << 20


@functools.cache
def builtin_names() -> tuple[str, ...]:
    """The names of the built-in recipes, by family and size, the one to try first."""
    names = [path.stem for path in _BUILTIN.glob("*.toml")]
    return tuple(sorted(names, key=_place))


def _place(name: str) -> tuple[str, float, bool, str]:
    family, label, *_ = name.split("-")
    return family, _size(label), not name.endswith("debug"), name


def _size(label: str) -> float:
    units = {"m": 1e6, "b": 1e9}
    return float(label[:-1]) * units[label[-1]] if label[:-1].replace(".", "").isdigit() else 0.0


def locate(name: str, folder: Path | None = None) -> Path:
    """The file of a recipe.

    Args:
        name: a built-in recipe's name, or the path of a file.
        folder: what a relative path starts from; the working directory by default.

    Returns:
        The path of the file.

    Raises:
        DrumlineError: there is no such recipe; says which names are close.
    """
    if name in builtin_names():
        return _BUILTIN / f"{name}.toml"
    if "\0" in name or not name.strip():
        raise DrumlineError(f"{name!r} is no recipe: give a built-in recipe's name or a file")
    try:
        path = (folder or Path()) / Path(name).expanduser()
    except RuntimeError:  # there is no such user
        path = (folder or Path()) / name
    try:
        if path.is_dir():
            inside = path / "recipe.json"
            hint = f"; did you mean the run's recipe, {inside}?" if inside.is_file() else ""
            raise DrumlineError(f"{name} is a folder; a recipe is a TOML file{hint}")
        if path.exists():
            return path
    except OSError as error:
        raise DrumlineError(f"recipe {name!r} cannot be read: {error.strerror}") from error
    if re.match(r"[a-z_]+(\.[a-z0-9_]+)*=", name):
        raise DrumlineError(
            f"{name!r} is an override: give a recipe before it, such as llama3-debug {shlex.quote(name)}"
        )
    if name.endswith((".toml", ".json")) or "/" in name:
        near = difflib.get_close_matches(path.name, _siblings(path), n=1, cutoff=0.6)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise DrumlineError(f"there is no recipe file {name}{hint}")
    close = difflib.get_close_matches(name.lower(), builtin_names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"built in are {', '.join(builtin_names())}"
    raise DrumlineError(f"no built-in recipe or file is called {name!r}; {hint}")


def _siblings(path: Path) -> list[str]:
    try:
        return [sibling.name for sibling in path.parent.iterdir() if sibling.suffix == path.suffix]
    except OSError:
        return []


def read_chain(name: str) -> tuple[Tree, list[Problem]]:
    """A recipe's tables, laid over those of the recipe that it extends, and so on.

    Args:
        name: a built-in recipe's name, or the path of a file.

    Returns:
        The merged tree, whose `name` is the file's stem unless it says otherwise; what is wrong with layout strings.

    Raises:
        DrumlineError: the file does not exist or cannot be read.
        RecipeError: a file is no TOML, or the chain of `extends` is broken or closed.
    """
    path = locate(name)
    chain: list[tuple[Path, Tree]] = []
    while True:
        tree = read_file(path)
        base = tree.pop("extends", None)
        chain.append((path, tree))
        if base is None:
            break
        if not isinstance(base, str):
            raise RecipeError(
                [Problem("extends-type", "extends", base, "must be the name or the path of one recipe")],
                str(path),
            )
        try:
            path = locate(base, path.parent)
        except DrumlineError as error:
            raise RecipeError(
                [Problem("extends-missing", "extends", base, f"cannot be followed: {error}")], str(path)
            ) from error
        visited = [seen.resolve() for seen, _ in chain]
        if path.resolve() in visited:
            circle = [str(seen) for seen, _ in chain[visited.index(path.resolve()) :]]
            rule = f"closes a circle: {' -> '.join([*circle, circle[0]])}"
            raise RecipeError([Problem("extends-cycle", "extends", base, rule)], str(chain[-1][0]))
    merged: Tree = {}
    problems = []
    for file, tree in reversed(chain):
        merged, found = merge({**merged, "name": file.stem}, tree)
        problems += found
    return merged, problems


def read_file(path: Path) -> Tree:
    """The tables of one file.

    Args:
        path: a `.json` file, or TOML under any other name.

    Returns:
        The tables.

    Raises:
        DrumlineError: the file cannot be read.
        RecipeError: its text is no TOML (or JSON).
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DrumlineError(f"recipe {path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise DrumlineError(f"recipe {path} is larger than 1 MiB; a recipe is a small text file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise _unreadable(path, f"line {line} is no UTF-8 text (byte 0x{content[error.start]:02x})") from error
    if not text.strip():
        raise _unreadable(path, 'the file is empty; a first line could be: extends = "llama3-debug"')
    is_json = path.suffix == ".json"
    try:
        tree: Any = json.loads(text) if is_json else tomllib.loads(text)
    except RecursionError as error:
        raise _unreadable(path, "its values are nested too deeply") from error
    except ValueError as error:  # of which the decoders' errors, and integers of more than 4,300 digits
        raise _unreadable(path, f"no {'JSON' if is_json else 'TOML'}: {error}") from error
    if not isinstance(tree, dict):
        raise _unreadable(path, "a recipe is a table of sections")
    return tree


def _unreadable(path: Path, rule: str) -> RecipeError:
    return RecipeError([Problem("file-syntax", "", ABSENT, rule)], str(path))
