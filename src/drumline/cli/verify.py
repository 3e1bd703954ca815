"""`drumline verify`: proves that layouts compute what one device computes."""

import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drumline.cli.environment import calm_threads, terminal
from drumline.cli.output import print_json, print_table
from drumline.recipe import CheckFailed, DrumlineError, Layout, load

if TYPE_CHECKING:
    from drumline.verify import Chosen, Refused, Result

LINE_EVERY_S = 15.0


def verify(
    recipe: Annotated[
        str | None, typer.Argument(help="A built-in recipe's name, or a TOML file; none with --matrix.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Dotted overrides.")] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="A layout such as dp2.tp2, any number of times; by default the recipe's.")
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Verify the built-in table of layouts and models.")] = False,
    only: Annotated[str, typer.Option(help="With --matrix: rows whose name matches, such as 'moe/*' or cp2.")] = "",
    ranks: Annotated[
        int, typer.Option(min=0, help="Ranks that run at a time; a layout of more runs alone. 0: 4 a core.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Prove that layouts compute what one device computes.

    A layout runs three steps on local ranks, on a model made small that keeps what the layout divides. Losses,
    gradients, their norm and the weights are compared with fp64 on one device, as ratios to the error of one device in
    the same precision; replicas bit for bit. Exit code 1 if a layout computes something else.
    """
    calm_threads()  # OpenMP reads its settings when torch is loaded
    chosen = _choose(recipe, overrides or [], layout or [], matrix, only)
    from drumline.verify import verify as run

    began = time.monotonic()
    cases = list(chosen.cases)
    results = list(_watched(run(cases, max_ranks=ranks or _ranks_here()), len(cases), as_json))
    place = {id(case): index for index, case in enumerate(cases)}
    results.sort(key=lambda result: place[id(result.case)])
    if as_json:
        print_json(_document(chosen, results, time.monotonic() - began))
    else:
        _print(chosen, results, time.monotonic() - began)
    _raise_what_is_wrong(results)


def _choose(recipe: str | None, overrides: list[str], layouts: list[str], matrix: bool, only: str) -> "Chosen":
    from drumline.verify import of_recipe, of_table, select_rows

    if matrix:
        typed = [word for word in (recipe or "", *overrides) if "=" in word]
        if typed:
            raise DrumlineError(
                f"--matrix has its own models and layouts, which {' '.join(typed)} would not change: "
                "leave overrides out, or verify a recipe with them\n"
                f"  try: drumline verify llama3-debug {shlex.join(typed)}"
            )
        if recipe or layouts:
            raise DrumlineError("--matrix has its own models and layouts: give a recipe, or --matrix, not both")
        return of_table(select_rows(only))
    if recipe is None:
        raise DrumlineError("give a recipe, or --matrix\n  try: drumline verify llama3-debug --layout dp2.cp2")
    if only:
        raise DrumlineError("--only picks rows of the built-in table; it needs --matrix")
    base = load(recipe, overrides, command="drumline verify")
    others = [text for text in overrides if not text.startswith("layout=")]
    named: dict[str, Layout] = {
        text: load(recipe, [f"layout={text}", *others], command="drumline verify").layout for text in layouts
    }
    named = named or {str(base.layout): base.layout}
    return of_recipe(base, list(named.items()), recipe)


def _ranks_here() -> int:
    from drumline.train.manifest import num_cores

    return 4 * num_cores()


def _watched(results: Iterable["Result"], total: int, as_json: bool) -> Iterator["Result"]:
    """Passes results on, and shows on stderr how far they are."""
    look, began, last, wrong = terminal(sys.stderr), time.monotonic(), time.monotonic(), 0
    bar: Any = None
    task: Any = None
    if look.is_tty:
        from rich.console import Console
        from rich.progress import Progress

        bar = Progress(console=Console(stderr=True, no_color=not look.has_color), transient=True)
        bar.start()
        task = bar.add_task("layouts", total=total)
    try:
        for done, result in enumerate(results, start=1):
            wrong += not result.ok
            if bar is not None:
                bar.update(task, completed=done, description=f"layouts, {wrong} wrong" if wrong else "layouts")
            elif time.monotonic() - last >= LINE_EVERY_S:
                last = time.monotonic()
                left = (last - began) / done * (total - done)
                sys.stderr.write(f"{done} of {total} layouts, {wrong} wrong, about {left:.0f} s left\n")
            yield result
    finally:
        if bar is not None:
            bar.stop()


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
    for reason, names in _by_reason(chosen.refused).items():
        sys.stdout.write(f"skipped {len(names)}: {reason}\n  {', '.join(names)}\n")
    for result in results:
        if result.verdict and result.verdict.flips:
            sys.stdout.write(f"{result.case.name}: {result.verdict.flips} choices of experts differ from fp64's\n")
    good = sum(result.ok for result in results)
    sys.stdout.write(f"{good} of {len(results)} layouts compute what one device computes ({seconds:.0f} s)\n")


def _by_reason(refused: Iterable["Refused"]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in refused:
        found.setdefault(_reason(one), []).append(f"{one.model}/{one.name}")
    return found


def _reason(refused: "Refused") -> str:
    return str(refused.problems[0]).split("\n")[0]


def _document(chosen: "Chosen", results: list["Result"], seconds: float) -> dict[str, Any]:
    from drumline.verify import LIMITS

    return {
        "layouts": [_entry(result) for result in results],
        "skipped": [
            {"layout": refused.name, "model": refused.model, "why": _reason(refused)} for refused in chosen.refused
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
