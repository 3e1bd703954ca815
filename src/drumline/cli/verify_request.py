"""What `drumline verify` is asked for, with --exact and without, and what both say of layouts that did not run."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from drumline.recipe import DrumlineError, Layout, Recipe, load

if TYPE_CHECKING:
    from drumline.verify import ExactResult, Refused, Result


def check_matrix(recipe: str | None, overrides: list[str], layouts: list[str], matrix: bool) -> None:
    """Refuses a table together with a recipe, or neither.

    Args:
        recipe: as it was given.
        overrides: as they were given.
        layouts: as they were given.
        matrix: the table is asked for.

    Raises:
        DrumlineError: says what to give.
    """
    if not matrix:
        raise DrumlineError("give a recipe, or --matrix\n  try: drumline verify llama3-debug --layout dp2.cp2")
    typed = [word for word in (recipe or "", *overrides) if "=" in word]
    if typed:
        raise DrumlineError(
            f"--matrix has its own models and layouts, which {' '.join(typed)} would not change: "
            "leave overrides out, or verify a recipe with them\n"
            f"  try: drumline verify llama3-debug {shlex.join(typed)}"
        )
    if recipe or layouts:
        raise DrumlineError("--matrix has its own models and layouts: give a recipe, or --matrix, not both")


def recipe_and_layouts(
    recipe: str, overrides: list[str], layouts: list[str], only: str
) -> tuple[Recipe, list[tuple[str, Layout]], str]:
    """What is asked for of a recipe.

    Args:
        recipe: its name.
        overrides: of its keys.
        layouts: to verify; none: the recipe's own.
        only: a pattern for the table, which has no place here.

    Returns:
        The recipe, the layouts by name, and the recipe's name.

    Raises:
        DrumlineError: a key or a layout cannot be read.
    """
    if only:
        raise DrumlineError("--only picks rows of the built-in table; it needs --matrix")
    base = load(recipe, overrides, command="drumline verify")
    others = [text for text in overrides if not text.startswith("layout=")]
    named: dict[str, Layout] = {
        text: load(recipe, [f"layout={text}", *others], command="drumline verify").layout for text in layouts
    }
    named = named or {str(base.layout): base.layout}
    return base, list(named.items()), recipe


def print_skipped(refused: Iterable["Refused"]) -> None:
    """Says which layouts did not run, by the reason."""
    for reason, names in _by_reason(refused).items():
        sys.stdout.write(f"skipped {len(names)}: {reason}\n  {', '.join(names)}\n")


def skipped(refused: Iterable["Refused"]) -> list[dict[str, str]]:
    """The layouts that did not run, as JSON values."""
    return [{"layout": one.name, "model": one.model, "why": _reason_of(one)} for one in refused]


def raise_failures(results: Sequence["Result"] | Sequence["ExactResult"]) -> None:
    """Raises where ranks failed, for then nothing was compared.

    Args:
        results: of all layouts.

    Raises:
        RuntimeError: names the layouts, and carries what the first rank that failed said.
    """
    from drumline.comm.forked import in_one_line

    failed = [result for result in results if result.failure]
    if failed:
        names = ", ".join(f"{result.case.model}/{result.case.name}" for result in failed)
        raise RuntimeError(f"ranks of {names} failed: {in_one_line(failed[0].failure)}\n{failed[0].failure}")


def _by_reason(refused: Iterable["Refused"]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in refused:
        found.setdefault(_reason_of(one), []).append(f"{one.model}/{one.name}")
    return found


def _reason_of(refused: "Refused") -> str:
    return str(refused.problems[0]).split("\n")[0]
