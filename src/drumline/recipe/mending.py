"""Finds a command that works: the overrides that were typed, with those that mend every problem."""

from collections.abc import Sequence

from drumline.recipe.conversion import form
from drumline.recipe.overrides import Tree, apply, drop
from drumline.recipe.problem import UNKNOWN_KEY, Problem
from drumline.recipe.rules import RULES, Machine

_ROUNDS = 6  # one remedy may call for another: a new layout deals the batch anew


def mend(tree: Tree, found: Sequence[Problem], machine: Machine, command: Sequence[str]) -> tuple[str, ...]:
    """A command whose recipe has no problem on a machine.

    Args:
        tree: the recipe's tables.
        found: the problems that it has.
        machine: where it will run.
        command: the words that the user typed, such as `("drumline", "train", "llama3-8b", "layout.tp=6")`.

    Returns:
        The words with remedies laid over them, tried and found to work; empty when no way is known.
    """
    if not command:
        return ()
    remedies: dict[str, str] = {}
    mistyped = {problem.key for problem in found if problem.code == UNKNOWN_KEY}
    for _ in range(_ROUNDS):
        if not all(problem.remedy for problem in found):
            return ()
        remedies |= {problem.remedy.split("=", 1)[0]: problem.remedy for problem in reversed(found)}
        for problem in found:
            if problem.code == UNKNOWN_KEY:
                tree = drop(tree, problem.key)
        ordered = sorted(remedies.values(), key=lambda remedy: remedy.count("."))  # layout=... before layout.tp=...
        tree, unread = apply(tree, ordered)
        recipe, faults = form(tree)
        found = [*unread, *faults]
        if recipe is not None:
            found += [problem for rule in RULES for problem in rule(recipe, machine)]
        if not found:
            gone = mistyped | remedies.keys()
            kept = [word for word in command if "=" not in word or word.split("=", 1)[0].strip() not in gone]
            return (*kept, *ordered)
    return ()
