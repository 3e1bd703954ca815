"""The values that a problem offers: each one tried against every rule before it is shown.

A rule knows which values satisfy itself; only all of them together know which values work. A value is offered where no
problem is left with its key and none has come that was not there before. Where none of a rule's values is such, those
that the next rule in the way offers are tried, and so on.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from drumline.recipe.judging import Attempt, names_of
from drumline.recipe.keys import is_within
from drumline.recipe.problem import UNKNOWN_KEY, Problem, override
from drumline.recipe.rules import Machine

_MOST_TRIES = 24  # for one problem; a message must not take longer than reading it


def with_tried_offers(attempt: Attempt, found: Sequence[Problem], machine: Machine) -> list[Problem]:
    """Problems that offer only what works.

    Args:
        attempt: the recipe.
        found: all of its problems, as the rules gave them.
        machine: where it will run.

    Returns:
        The problems in their order, as `with_tried_offer` gives them.
    """
    return [with_tried_offer(attempt, problem, found, machine) for problem in found]


def with_tried_offer(attempt: Attempt, problem: Problem, found: Sequence[Problem], machine: Machine) -> Problem:
    """A problem that offers only what works.

    Args:
        attempt: the recipe.
        problem: one of its problems.
        found: all of them, as the rules gave them.
        machine: where it will run.

    Returns:
        The problem with `nearest` and `remedy` tried; empty where nothing that was tried works.
    """
    nearest, remedy = problem.nearest, problem.remedy
    if problem.code != UNKNOWN_KEY:  # which offers names of keys
        nearest = _tried_values(attempt, problem, found, machine)
        is_own = is_within(remedy.split("=", 1)[0], problem.key)
        if nearest and (is_own or not _mends(attempt, problem, found, machine)):
            return dataclasses.replace(problem, nearest=nearest, remedy=override(problem.key, nearest[0]))
    if remedy and not _mends(attempt, problem, found, machine):
        remedy = ""
    return dataclasses.replace(problem, nearest=nearest, remedy=remedy)


def apply_remedy(attempt: Attempt, problem: Problem) -> Attempt:
    """The recipe with a problem's remedy laid over it; a key that does not exist goes."""
    return (attempt.drop(problem.key) if problem.code == UNKNOWN_KEY else attempt).override(problem.remedy)


def _mends(attempt: Attempt, problem: Problem, found: Sequence[Problem], machine: Machine) -> bool:
    left = names_of(apply_remedy(attempt, problem).judge(machine))
    return left <= names_of(found) - {(problem.code, problem.key)}


def _tried_values(attempt: Attempt, problem: Problem, found: Sequence[Problem], machine: Machine) -> tuple[Any, ...]:
    """The values of the problem's key that work, of those that the rules in the way offer."""
    before = names_of(found)
    tried: dict[str, Any] = {}
    candidates: Iterable[Any] = problem.nearest
    while candidates:
        works, further = [], []
        for value in candidates:
            text = override(problem.key, value)
            if text in tried or len(tried) == _MOST_TRIES:
                continue
            tried[text] = value
            left = attempt.override(text).judge(machine)
            in_the_way = [other for other in left if is_within(other.key, problem.key)]
            if not in_the_way and names_of(left) <= before:
                works.append(value)
            further += [value for other in in_the_way if other.key == problem.key for value in other.nearest]
        if works:
            return tuple(works)
        candidates = further
    return ()
