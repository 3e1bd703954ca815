"""`drumline numerics diff --localize`: runs b's recipe again on a's values, and prints where the two part."""

import shlex
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from drumline.cli.output import print_table
from drumline.recipe import Recipe

if TYPE_CHECKING:
    from drumline.capture.reading import Capture
    from drumline.train.captured import Wanted
    from drumline.verify.localize import Localized


def locate(a: "Capture", b: "Capture") -> "Localized":
    """Finds where two captures that differ part.

    Args:
        a: taken for what is right.
        b: is run again on a's values.

    Returns:
        What was found.
    """
    from drumline.train.manifest import source_digest
    from drumline.verify.localize import localize

    words = [str(word) for word in a.manifest.environment.get("command", ())]
    known = words[:2] == ["numerics", "capture"]
    plain = _without(words, ("--level", "--only", "--out")) if known else ["numerics", "capture", "RECIPE"]
    command = shlex.join(["drumline", *plain])
    with tempfile.TemporaryDirectory(prefix="drumline-localize-") as scratch:
        return localize(a, b, _run, Path(scratch), source=source_digest(), command=command)


def _without(words: list[str], options: tuple[str, ...]) -> list[str]:
    """The words of a command without some options and their values."""
    kept, is_value = [], False
    for word in words:
        if is_value:
            is_value = False
        elif word in options:
            is_value = True
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            kept.append(word)
    return kept


def _run(recipe: Recipe, wanted: "Wanted") -> None:
    from drumline.cli.train import check_fits_here, check_runs_here
    from drumline.comm import read_place
    from drumline.comm.forked import run_forked
    from drumline.train.captured import capture_rank

    num_ranks = recipe.layout.num_ranks
    check_fits_here(num_ranks)
    check_runs_here(recipe, num_ranks, ("drumline", "numerics", "diff"))
    run_forked(
        num_ranks,
        lambda: capture_rank(recipe, read_place(), wanted),
        recipe.resilience.timeout_s,
        f"{recipe.layout} could not be run again",
    )


def tell(found: "Localized", limit: int) -> None:
    """Prints where two captures part.

    Args:
        found: by `locate`.
        limit: tensors to list; 0: all.
    """
    for note in found.notes:
        typer.echo(f"note: {note}")
    shown = found.tensors[:limit] if limit else found.tensors
    if shown:
        typer.echo(f"step {found.step}, each module of b on a's inputs:")
        rows = [(e.key, f"{e.relative:.1e}", f"{e.ratio:,.2g}", _outcome(e.verdict, e.is_passed_on)) for e in shown]
        print_table(
            ("tensor", "own difference", "x rounding", "outcome"), rows, numeric=("own difference", "x rounding")
        )
    if len(shown) < len(found.tensors):
        typer.echo(f"... and {len(found.tensors) - len(shown):,} more (--rows 0 lists all)")
    for line in in_words(found):
        typer.echo(line)


def in_words(found: "Localized") -> list[str]:
    """Where two captures part, in lines."""
    if not found.origin:
        worst = max((each.ratio for each in found.tensors), default=0.0)
        return [f"{found.why_no_operator}: at most {worst:.2g} times what one rounding of a module's inputs does"]
    origin = next(each for each in found.tensors if each.key == found.origin)
    rank = f", most on rank {origin.rank} of b" if origin.rank >= 0 else ""
    what = f"{found.module} computes otherwise" if found.module else "what differs by itself"
    lines = [f"{what}: {found.origin} is {origin.ratio:,.3g} times as far off as rounding explains{rank}"]
    if found.operator is not None:
        operator = found.operator
        lines.append(f"  operator {operator.key} at {operator.source}, rank {operator.rank}: {operator.why}")
    elif found.why_no_operator:
        lines.append(f"  no operator is named: {found.why_no_operator}")
    return lines


def document(found: "Localized") -> dict[str, Any]:
    """What was found as JSON values."""
    return asdict(found)


def _outcome(verdict: str, is_passed_on: bool) -> str:
    words = {"same": "same bits", "rounding": "rounding", "differs": "DIFFERS"}[verdict]
    return f"{words}, passes on what it gets" if is_passed_on and verdict == "same" else words
