"""Reads a recipe: its file, what that extends, the overrides, and every fault of form at once."""

from collections.abc import Sequence

from drumline.recipe.conversion import form
from drumline.recipe.errors import RecipeError
from drumline.recipe.files import read_chain
from drumline.recipe.mending import mend
from drumline.recipe.overrides import Tree, apply, drop
from drumline.recipe.problem import UNKNOWN_KEY, Problem
from drumline.recipe.rules import Machine
from drumline.recipe.sections import Recipe
from drumline.recipe.validation import problems_despite


def load(name_or_path: str, overrides: Sequence[str] = (), *, command: str = "drumline recipe validate") -> Recipe:
    """Reads a recipe.

    Args:
        name_or_path: a built-in recipe's name, a TOML file, or the `recipe.json` of a run.
        overrides: `key=value` each, laid over it in their order.
        command: what the user ran, up to the recipe's name; lines to try start with it.

    Returns:
        The recipe. Each of its values is of the right type and in range; `problems` says whether they go together.

    Raises:
        DrumlineError: there is no such recipe.
        RecipeError: with every fault of form, and every rule that the sound keys break.
    """
    tree, found = read_chain(name_or_path)
    tree, wrong = apply(tree, overrides)
    typed = {text.split("=", 1)[0].strip() for text in overrides}
    found = [problem for problem in found if problem.key not in typed] + wrong  # what is replaced does no harm
    recipe, faults = form(tree)
    found += [_mend_in_file(fault, typed) for fault in faults]
    if recipe is None or found:
        broken = {problem.key for problem in found if problem.key}
        sound = _without(tree, broken)
        if sound is not None:
            found += problems_despite(sound, broken)
        words = (*command.split(), name_or_path, *overrides)
        raise RecipeError(found, name_or_path, mend(tree, found, Machine(), words))
    return recipe


def _without(tree: Tree, broken: set[str]) -> Recipe | None:
    """The recipe with defaults for what is broken, so that the other keys can be judged."""
    for key in broken:
        tree = drop(tree, key)
    return form(tree)[0]


def _mend_in_file(fault: Problem, typed: set[str]) -> Problem:
    """No override takes an unknown key out of a file, so a line to try would not work."""
    if fault.code != UNKNOWN_KEY or fault.key in typed:
        return fault
    return Problem(fault.code, fault.key, fault.value, fault.rule, fault.nearest)
