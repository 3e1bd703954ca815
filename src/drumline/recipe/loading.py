"""Reads a recipe: its file, what that extends, the overrides, and every fault of form at once."""

import dataclasses
from collections.abc import Sequence

from drumline.recipe.conversion import form
from drumline.recipe.errors import RecipeError
from drumline.recipe.files import read_chain
from drumline.recipe.judging import Attempt
from drumline.recipe.mending import mend
from drumline.recipe.offers import with_tried_offers
from drumline.recipe.overrides import apply
from drumline.recipe.problem import UNKNOWN_KEY
from drumline.recipe.rules import Machine
from drumline.recipe.sections import Recipe

_ANY_MACHINE = Machine()


def load(
    name_or_path: str,
    overrides: Sequence[str] = (),
    *,
    command: str = "drumline recipe validate",
    options: Sequence[str] = (),
    machine: Machine = _ANY_MACHINE,
) -> Recipe:
    """Reads a recipe.

    Args:
        name_or_path: a built-in recipe's name, a TOML file, or the `recipe.json` of a run.
        overrides: `key=value` each, laid over it in their order.
        command: what the user ran, up to the recipe's name; lines to try start with it.
        options: what the user said besides, such as `("--nproc", "4")`; lines to try end with it.
        machine: where it will run, as far as that is known: what is offered in place of a fault works there.

    Returns:
        The recipe. Each of its values is of the right type and in range; `problems` says whether they go together.

    Raises:
        DrumlineError: there is no such recipe.
        RecipeError: with every fault of form, and every rule that the sound keys break.
    """
    tree, found = read_chain(name_or_path)
    tree, wrong = apply(tree, overrides)
    typed = {text.split("=", 1)[0].strip() for text in overrides}
    unread = [problem for problem in found if problem.key not in typed] + wrong  # what is replaced does no harm
    recipe, faults = form(tree)
    if recipe is not None and not unread:
        return recipe
    attempt = Attempt(tree, tuple(unread))
    found = attempt.judge(machine)
    # No override takes an unknown key out of a file, so that neither a line to try nor a command would work.
    in_file = {problem.key for problem in faults if problem.code == UNKNOWN_KEY} - typed
    found = [dataclasses.replace(problem, remedy="") if problem.key in in_file else problem for problem in found]
    words = () if in_file else (*command.split(), name_or_path, *overrides, *options)
    raise RecipeError(with_tried_offers(attempt, found, machine), name_or_path, mend(attempt, found, machine, words))
