"""Whether a recipe's keys go together, and fit a machine: every problem at once, before a process starts."""

from collections.abc import Collection, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from drumline.recipe.errors import RecipeError
from drumline.recipe.mending import mend
from drumline.recipe.problem import Problem
from drumline.recipe.rules import RULES, Machine
from drumline.recipe.sections import Recipe


def problems(
    recipe: Recipe,
    *,
    world_size: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    has_bf16: bool = True,
    accelerators: Collection[str] | None = None,
) -> list[Problem]:
    """Every rule that a recipe breaks; pure.

    Args:
        recipe: the recipe.
        world_size: ranks that run; not judged when None.
        device: what computes; not judged when None.
        has_bf16: the device multiplies bf16.
        accelerators: names that `metrics.peak` may have; not judged when None.

    Returns:
        The problems, in the order of the rules; empty when the recipe can run.
    """
    machine = Machine(world_size, device, has_bf16, accelerators)
    return [found for rule in RULES for found in rule(recipe, machine)]


def check(
    recipe: Recipe,
    *,
    world_size: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    has_bf16: bool = True,
    accelerators: Collection[str] | None = None,
    command: Sequence[str] = (),
) -> None:
    """Raises when a recipe cannot run.

    Args:
        recipe: the recipe.
        world_size: as for `problems`.
        device: as for `problems`.
        has_bf16: as for `problems`.
        accelerators: as for `problems`.
        command: the words that the user typed, such as `("drumline", "train", "llama3-8b", "layout.tp=6")`; the message
            ends with these, mended, where a way is found.

    Raises:
        RecipeError: with every problem.
    """
    found = problems(recipe, world_size=world_size, device=device, has_bf16=has_bf16, accelerators=accelerators)
    if found:
        machine = Machine(world_size, device, has_bf16, accelerators)
        raise RecipeError(found, recipe.name, mend(recipe.model_dump(mode="json"), found, machine, command))


def problems_despite(recipe: Recipe, broken: Collection[str]) -> list[Problem]:
    """The rules that a recipe breaks by its sound keys alone: a rule that reads a broken key is not judged.

    Args:
        recipe: the recipe, with any values for the broken keys.
        broken: dotted keys whose values are not the user's.

    Returns:
        The problems.
    """
    found: list[Problem] = []
    machine = Machine()
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
        if any(bad == touched or bad.startswith(f"{touched}.") for bad in self._broken):
            raise _BrokenKeyRead
        return value
