"""`drumline verify`: proves that layouts compute what one device computes."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drumline.cli.environment import calm_threads
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
    from drumline.verify import Chosen, Result


def verify(
    recipe: Annotated[
        str | None, typer.Argument(help="A built-in recipe's name, or a TOML file; none with --matrix.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Dotted overrides.")] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="A layout such as dp2.tp2, any number of times; by default the recipe's.")
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Verify the built-in table of layouts and models.")] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="In exact mode, ten steps: hold every bit against one rank.")
    ] = False,
    only: Annotated[str, typer.Option(help="With --matrix: rows whose name matches, such as 'moe/*' or cp2.")] = "",
    ranks: Annotated[
        int, typer.Option(min=0, help="Ranks that run at a time; a layout of more runs alone. 0: 4 a core.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Prove that layouts compute what one device computes.

    A layout runs three steps on local ranks, on a model made small that keeps what the layout divides. Losses,
    gradients, their norm and the weights are compared with fp64 on one device, as ratios to the error of one device in
    the same precision; replicas bit for bit. With --exact, ten steps in exact mode must have the very bits of one
    rank. Exit code 1 if a layout computes something else.
    """
    calm_threads()  # OpenMP reads its settings when torch is loaded
    if exact:
        from drumline.cli.verify_exact import verify_bits

        verify_bits(
            recipe,
            overrides or [],
            layout or [],
            matrix=matrix,
            only=only,
            max_ranks=ranks or ranks_here(),
            as_json=as_json,
        )
        return
    chosen = _choose(recipe, overrides or [], layout or [], matrix, only)
    from drumline.verify import verify as run

    began = time.monotonic()
    cases = list(chosen.cases)
    results = list(watched(run(cases, max_ranks=ranks or ranks_here()), len(cases)))
    place = {id(case): index for index, case in enumerate(cases)}
    results.sort(key=lambda result: place[id(result.case)])
    if as_json:
        print_json(_document(chosen, results, time.monotonic() - began))
    else:
        _print(chosen, results, time.monotonic() - began)
    _raise_what_is_wrong(results)


def _choose(recipe: str | None, overrides: list[str], layouts: list[str], matrix: bool, only: str) -> "Chosen":
    from drumline.verify import of_recipe, of_table, select_rows

    if recipe is None or matrix:
        check_matrix(recipe, overrides, layouts, matrix)
        return of_table(select_rows(only))
    return of_recipe(*recipe_and_layouts(recipe, overrides, layouts, only))


def ranks_here() -> int:
    """Ranks that run at a time: four a core, since they mostly wait for one another."""
    from drumline.train.manifest import num_cores

    return 4 * num_cores()


def _print(chosen: "Chosen", results: list["Result"], seconds: float) -> None:
    if chosen.kept:
        sys.stdout.write("made small: " + "; ".join(chosen.kept) + "\n")
    rows = [
        (
            result.case.name,
            result.case.model,
            result.case.recipe.precision.compute,
            str(result.case.recipe.layout.num_ranks),
            "yes" if result.ok else "NO" if result.verdict else "failed",
            f"{result.verdict.worst_ratio:.2f}" if result.verdict else "",
            result.verdict.worst_key if result.verdict else "",
            ("equal" if result.verdict.bitwise else "DIFFER") if result.verdict else "",
            f"{result.seconds:.1f}",
        )
        for result in results
    ]
    columns = ("layout", "model", "precision", "ranks", "ok", "worst ratio", "at", "replicas", "seconds")
    if rows:
        print_table(columns, rows, numeric=("ranks", "worst ratio", "seconds"))
    print_skipped(chosen.refused)
    for result in results:
        if result.verdict and result.verdict.flips:
            sys.stdout.write(f"{result.case.name}: {result.verdict.flips} choices of experts differ from fp64's\n")
    good = sum(result.ok for result in results)
    sys.stdout.write(f"{good} of {len(results)} layouts compute what one device computes ({seconds:.0f} s)\n")


def _document(chosen: "Chosen", results: list["Result"], seconds: float) -> dict[str, Any]:
    from drumline.verify import LIMITS

    return {
        "layouts": [_entry(result) for result in results],
        "skipped": skipped(chosen.refused),
        "kept": list(chosen.kept),
        "limits": dict(LIMITS),
        "seconds": seconds,
    }


def _entry(result: "Result") -> dict[str, Any]:
    from drumline.comm.forked import in_one_line

    recipe, verdict = result.case.recipe, result.verdict
    return {
        "layout": result.case.name,
        "model": result.case.model,
        "precision": recipe.precision.compute,
        "ranks": recipe.layout.num_ranks,
        "ok": result.ok,
        "worst_ratio": verdict.worst_ratio if verdict else None,
        "worst_key": verdict.worst_key if verdict else "",
        "first_wrong": verdict.first_wrong if verdict else "",
        "why": verdict.why if verdict else in_one_line(result.failure),
        "bitwise": verdict.bitwise if verdict else None,
        "flips": verdict.flips if verdict else None,
        "seconds": result.seconds,
    }


def _raise_what_is_wrong(results: list["Result"]) -> None:
    raise_failures(results)
    lines = [
        f"{result.case.model}/{result.case.name} ({result.case.recipe.precision.compute}): "
        f"{result.verdict.first_wrong} {result.verdict.why}"
        for result in results
        if result.verdict is not None and not result.ok
    ]
    if lines:
        raise CheckFailed("first tensor that is wrong, as step/kind/name:\n  " + "\n  ".join(lines))
