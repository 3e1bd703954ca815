"""`drumline verify --exact`: holds every bit of ten steps in exact mode against one rank."""

import sys
import time
from typing import TYPE_CHECKING, Any

from drumline.cli.output import print_json, print_table
from drumline.cli.verify_request import (
    check_matrix,
    print_skipped,
    raise_failures,
    recipe_and_layouts,
    skipped,
)
from drumline.cli.watching import watched
from drumline.recipe import CheckFailed

if TYPE_CHECKING:
    from drumline.verify import Chosen, ExactResult


def verify_bits(
    recipe: str | None,
    overrides: list[str],
    layouts: list[str],
    *,
    matrix: bool,
    only: str,
    max_ranks: int,
    as_json: bool,
) -> None:
    """Runs what is asked for and says what came of it.

    Args:
        recipe: its name; None with the table.
        overrides: of its keys.
        layouts: to verify.
        matrix: run the built-in table.
        only: a pattern for the table.
        max_ranks: ranks that run at a time.
        as_json: print one JSON document.

    Raises:
        CheckFailed: a layout has other bits than one rank.
        RuntimeError: ranks failed.
    """
    from drumline.verify import EXACT_ROWS, of_exact_recipe, of_exact_table, select_rows, verify_exact

    if recipe is None or matrix:
        check_matrix(recipe, overrides, layouts, matrix)
        chosen = of_exact_table(select_rows(only, EXACT_ROWS))
    else:
        chosen = of_exact_recipe(*recipe_and_layouts(recipe, overrides, layouts, only))
    began = time.monotonic()
    place = {id(case): index for index, case in enumerate(chosen.cases)}
    results = sorted(
        watched(verify_exact(chosen.cases, max_ranks=max_ranks), len(chosen.cases)), key=lambda r: place[id(r.case)]
    )
    if as_json:
        print_json(_document(chosen, results, time.monotonic() - began))
    else:
        _print(chosen, results, time.monotonic() - began)
    _raise_what_is_wrong(results)


def _print(chosen: "Chosen", results: list["ExactResult"], seconds: float) -> None:
    if chosen.kept:
        sys.stdout.write("made small: " + "; ".join(chosen.kept) + "\n")
    rows = [
        (
            result.case.name,
            result.case.model,
            result.case.recipe.precision.compute,
            str(result.case.recipe.layout.num_ranks),
            "yes" if result.ok else "failed" if result.failure else "NO",
            f"{result.num_compared:,}",
            f"{result.num_different:,}",
            f"{result.seconds:.1f}",
        )
        for result in results
    ]
    columns = ("layout", "model", "precision", "ranks", "same bits", "compared", "different", "seconds")
    if rows:
        print_table(columns, rows, numeric=("ranks", "compared", "different", "seconds"))
    print_skipped(chosen.refused)
    good = sum(result.ok for result in results)
    sys.stdout.write(f"{good} of {len(results)} layouts have the bits of one rank ({seconds:.0f} s)\n")


def _document(chosen: "Chosen", results: list["ExactResult"], seconds: float) -> dict[str, Any]:
    from drumline.comm.forked import in_one_line

    return {
        "layouts": [
            {
                "layout": result.case.name,
                "model": result.case.model,
                "precision": result.case.recipe.precision.compute,
                "ranks": result.case.recipe.layout.num_ranks,
                "ok": result.ok,
                "num_compared": result.num_compared,
                "num_different": result.num_different,
                "first_wrong": result.first,
                "why": result.why or (in_one_line(result.failure) if result.failure else ""),
                "seconds": result.seconds,
            }
            for result in results
        ],
        "skipped": skipped(chosen.refused),
        "kept": list(chosen.kept),
        "seconds": seconds,
    }


def _raise_what_is_wrong(results: list["ExactResult"]) -> None:
    raise_failures(results)
    from drumline.verify.exact import words

    lines = [
        f"{result.case.model}/{result.case.name} ({result.case.recipe.precision.compute}): "
        f"{words(result.first)} {result.why}"
        for result in results
        if not result.ok
    ]
    if lines:
        raise CheckFailed("first tensor with other bits than on one rank:\n  " + "\n  ".join(lines))
