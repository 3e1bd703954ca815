"""Whether a recipe's keys go together, and fit a machine: every problem at once, before a process starts."""

from collections.abc import Collection, Sequence
from typing import Literal

from drumline.recipe.errors import RecipeError
from drumline.recipe.judging import Attempt, broken_rules
from drumline.recipe.mending import mend
from drumline.recipe.offers import with_tried_offers
from drumline.recipe.problem import Problem
from drumline.recipe.rules import Machine
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
        The problems, in the order of the rules, with offers that were tried against all of them; empty when the recipe
        can run.
    """
    machine = Machine(world_size, device, has_bf16, accelerators)
    found = broken_rules(recipe, machine)
    return with_tried_offers(_attempt(recipe), found, machine) if found else []


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
            ends with these, mended, where a way is found. Options come last.

    Raises:
        RecipeError: with every problem.
    """
    machine = Machine(world_size, device, has_bf16, accelerators)
    found = broken_rules(recipe, machine)
    if found:
        attempt = _attempt(recipe)
        mended = mend(attempt, found, machine, command)
        raise RecipeError(with_tried_offers(attempt, found, machine), recipe.name, mended)


def _attempt(recipe: Recipe) -> Attempt:
    return Attempt(recipe.model_dump(mode="json"))
