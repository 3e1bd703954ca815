"""`drumline verify`: proves that layouts compute what one device computes."""

import shlex
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drumline.cli.environment import calm_threads
from drumline.cli.output import print_json, print_table
from drumline.cli.watching import watched
from drumline.recipe import CheckFailed, DrumlineError, Layout, Recipe, load

if TYPE_CHECKING:
    from drumline.verify import Chosen, Refused, Result


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
    for reason, names in by_reason(chosen.refused).items():
        sys.stdout.write(f"skipped {len(names)}: {reason}\n  {', '.join(names)}\n")
    for result in results:
        if result.verdict and result.verdict.flips:
            sys.stdout.write(f"{result.case.name}: {result.verdict.flips} choices of experts differ from fp64's\n")
    good = sum(result.ok for result in results)
    sys.stdout.write(f"{good} of {len(results)} layouts compute what one device computes ({seconds:.0f} s)\n")


def by_reason(refused: Iterable["Refused"]) -> dict[str, list[str]]:
    """The names of layouts that are refused, by the first reason."""
    found: dict[str, list[str]] = {}
    for one in refused:
        found.setdefault(reason_of(one), []).append(f"{one.model}/{one.name}")
    return found


def reason_of(refused: "Refused") -> str:
    """The first reason, on one line."""
    return str(refused.problems[0]).split("\n")[0]


def _document(chosen: "Chosen", results: list["Result"], seconds: float) -> dict[str, Any]:
    from drumline.verify import LIMITS

    return {
        "layouts": [_entry(result) for result in results],
        "skipped": [
            {"layout": refused.name, "model": refused.model, "why": reason_of(refused)} for refused in chosen.refused
        ],
        "kept": list(chosen.kept),
        "limits": dict(LIMITS),
        "seconds": seconds,
    }


def _entry(result: "Result") -> dict[str, Any]:
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
        "why": verdict.why if verdict else _last_line(result),
        "bitwise": verdict.bitwise if verdict else None,
        "flips": verdict.flips if verdict else None,
        "seconds": result.seconds,
    }


def _last_line(result: "Result") -> str:
    return result.failure.strip().splitlines()[-1]


def _raise_what_is_wrong(results: list["Result"]) -> None:
    failed = [result for result in results if result.verdict is None]
    if failed:
        names = ", ".join(f"{result.case.model}/{result.case.name}" for result in failed)
        raise RuntimeError(f"ranks of {names} failed: {_last_line(failed[0])}\n{failed[0].failure}")
    lines = [
        f"{result.case.model}/{result.case.name} ({result.case.recipe.precision.compute}): "
        f"{result.verdict.first_wrong} {result.verdict.why}"
        for result in results
        if result.verdict is not None and not result.ok
    ]
    if lines:
        raise CheckFailed("first tensor that is wrong, as step/kind/name:\n  " + "\n  ".join(lines))
