"""A recipe as it might be: its tables with overrides laid over them, and every problem that they have on a machine."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from drumline.recipe.conversion import form
from drumline.recipe.keys import is_within
from drumline.recipe.overrides import Tree, apply, drop
from drumline.recipe.problem import Problem
from drumline.recipe.rules import RULES, Machine
from drumline.recipe.sections import Recipe


@dataclass(frozen=True)
class Attempt:
    """A recipe that may or may not be sound.

    Attributes:
        tree: its tables.
        unread: what was said but could not be laid over the tables, such as a layout string.
    """

    tree: Tree
    unread: tuple[Problem, ...] = ()

    def override(self, *texts: str) -> "Attempt":
        """The attempt with overrides, `key=value` each, laid over it."""
        tree, found = apply(self.tree, texts)
        replaced = {text.split("=", 1)[0] for text in texts}
        kept = [problem for problem in self.unread if not any(is_within(problem.key, key) for key in replaced)]
        return Attempt(tree, (*kept, *found))

    def drop(self, key: str) -> "Attempt":
        """The attempt without a dotted key."""
        return Attempt(drop(self.tree, key), self.unread)

    def judge(self, machine: Machine) -> list[Problem]:
        """Every fault of form, and every rule that the sound keys break; no value that a problem offers was tried."""
        recipe, faults = form(self.tree)
        found = [*self.unread, *faults]
        if recipe is not None and not found:
            return broken_rules(recipe, machine)
        broken = {problem.key for problem in found if problem.key}
        tree = self.tree
        for key in broken:
            tree = drop(tree, key)  # defaults, so that the other keys can be judged
        sound = form(tree)[0]
        return found + (_rules_despite(sound, broken, machine) if sound is not None else [])


def broken_rules(recipe: Recipe, machine: Machine) -> list[Problem]:
    """Every rule that a recipe breaks, in the order of the rules; no value that a problem offers was tried."""
    return [found for rule in RULES for found in rule(recipe, machine)]


def names_of(found: Sequence[Problem]) -> set[tuple[str, str]]:
    """What tells problems apart, whatever their values: code and key."""
    return {(problem.code, problem.key) for problem in found}


def _rules_despite(recipe: Recipe, broken: Collection[str], machine: Machine) -> list[Problem]:
    """The rules that a recipe breaks by its sound keys alone: a rule that reads a broken key is not judged."""
    found: list[Problem] = []
    for rule in RULES:
        try:
            found += rule(_Sound(recipe, "", broken), machine)  # pyright: ignore[reportArgumentType]
        except _BrokenKeyRead:
            continue
    return found


class _BrokenKeyRead(Exception):  # noqa: N818 - a signal, never seen by a user
    pass


class _Sound:
    """A section that refuses to be read where it is broken."""

    def __init__(self, section: BaseModel, key: str, broken: Collection[str]):
        self._section, self._key, self._broken = section, key, broken

    def __getattr__(self, name: str) -> Any:
        section = self._section
        key = f"{self._key}.{name}".lstrip(".")
        derived = name not in type(section).model_fields  # a property reads any field of its section
        value = getattr(section, name)
        if isinstance(value, BaseModel) and not derived and key not in self._broken:
            return _Sound(value, key, self._broken)
        touched = self._key if derived else key
        if any(is_within(bad, touched) for bad in self._broken):
            raise _BrokenKeyRead
        return value
