"""Finds a command that works: the overrides that were typed, with those that mend every problem."""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from drumline.recipe.judging import Attempt
from drumline.recipe.keys import is_within
from drumline.recipe.offers import apply_remedy, with_tried_offer
from drumline.recipe.problem import UNKNOWN_KEY, Problem
from drumline.recipe.rules import Machine

_MOST_WAYS = 40  # that are followed; a message must not take longer than reading it


@dataclass(frozen=True)
class _Mended:
    """A recipe on its way: what it is now, what is wrong with it, and the overrides that brought it here."""

    attempt: Attempt
    found: Sequence[Problem]
    remedies: tuple[str, ...] = ()
    gone: frozenset[str] = frozenset()  # keys that were typed and do not exist


def mend(attempt: Attempt, found: Sequence[Problem], machine: Machine, command: Sequence[str]) -> tuple[str, ...]:
    """A command whose recipe has no problem on a machine.

    Remedies are laid over the recipe one after another, those first that bring nothing new. Where only others are left,
    which trade a problem for one with another key, each of them is followed, the ways with the fewest problems first.

    Args:
        attempt: the recipe.
        found: the problems that it has, with what the rules offer.
        machine: where it will run.
        command: the words that the user typed, such as `("drumline", "train", "llama3-8b", "layout.tp=6")`; options
            come last.

    Returns:
        The words with remedies laid over them, tried and found to work; empty when no way is known.
    """
    if not command or any(not problem.key for problem in found):
        return ()
    order = itertools.count()
    waiting = [(len(found), next(order), _Mended(attempt, found))]
    seen: set[frozenset[str]] = set()
    for _ in range(_MOST_WAYS):
        if not waiting:
            break
        *_, best = heapq.heappop(waiting)
        if not best.found:
            return _words(command, _without_needless(attempt, best, machine))
        for further in _further(best, machine):
            if (name := frozenset(further.remedies)) not in seen:
                seen.add(name)
                heapq.heappush(waiting, (len(further.found), next(order), further))
    return ()


def _further(now: _Mended, machine: Machine) -> Iterator[_Mended]:
    for problem in now.found:
        tried = with_tried_offer(now.attempt, problem, now.found, machine)
        if tried.remedy:
            yield _apply(now, tried, machine)
            return
    for problem in now.found:
        if problem.remedy:
            yield _apply(now, problem, machine)


def _apply(now: _Mended, problem: Problem, machine: Machine) -> _Mended:
    attempt = apply_remedy(now.attempt, problem)
    key = problem.remedy.split("=", 1)[0]
    kept = [remedy for remedy in now.remedies if not is_within(remedy.split("=", 1)[0], key)]
    gone = now.gone | ({problem.key} if problem.code == UNKNOWN_KEY else set())
    return _Mended(attempt, attempt.judge(machine), (*kept, problem.remedy), gone)


def _without_needless(attempt: Attempt, mended: _Mended, machine: Machine) -> _Mended:
    """Without the remedies that a later one made needless; where a key was meant by another name, all are kept."""
    remedies = list(mended.remedies)
    for remedy in mended.remedies:
        others = [other for other in remedies if other != remedy]
        if not attempt.override(*others).judge(machine):
            remedies = others
    return replace(mended, remedies=tuple(remedies))


def _words(command: Sequence[str], mended: _Mended) -> tuple[str, ...]:
    """The command with the overrides that were found in place of those that they replace, before its options."""
    gone = mended.gone | {remedy.split("=", 1)[0] for remedy in mended.remedies}
    kept = [
        word
        for word in command
        if "=" not in word or not any(is_within(word.split("=", 1)[0].strip(), key) for key in gone)
    ]
    options = next((at for at, word in enumerate(kept) if word.startswith("--")), len(kept))
    return (*kept[:options], *mended.remedies, *kept[options:])
