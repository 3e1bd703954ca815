"""How the differences of two captures are printed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from drumline.cli.environment import terminal
from drumline.cli.output import print_table

if TYPE_CHECKING:
    from drumline.capture.diff import Diff, Row
    from drumline.capture.operator_diff import OperatorRow

MAPS = 40
"""Tensors of which a report shows where they differ."""

COLUMNS = ("tensor", "unequal", "ulp", "relative", "max abs", "slope", "worst row", "worst column", "nan", "why")
NUMERIC = ("unequal", "ulp", "relative", "max abs", "slope", "worst row", "worst column", "nan")


def tell(found: "Diff", limit: int) -> None:
    """Prints a comparison for people.

    Args:
        found: the comparison.
        limit: tensors that differ to list; 0: all.
    """
    for name, x, y in found.recipe:
        typer.echo(f"the recipes differ: {name} = {x} in a, {y} in b")
    different = found.different
    shown = different[:limit] if limit else different
    if shown:
        print_table(COLUMNS, [cells(row) for row in shown], numeric=NUMERIC)
    if len(shown) < len(different):
        typer.echo(f"... and {len(different) - len(shown):,} more (--rows 0 lists all)")
    for side, names in zip("ab", found.only, strict=True):
        if names:
            typer.echo(f"only in {side}: {len(names):,} tensors, such as {names[0]}")
    _tell_operators(found, limit)
    typer.echo(summary(found))


def _tell_operators(found: "Diff", limit: int) -> None:
    operators = found.operators
    if operators is None:
        return
    if operators.refused:
        typer.echo(f"operators are not compared: {operators.refused}")
        return
    different = operators.different
    shown = different[:limit] if limit else different
    if shown:
        print_table(
            ("operator", "line", "ranks", "inputs", "why"),
            [(r.key, r.source, "/".join(map(str, r.ranks)), inputs_in_words(r), r.why) for r in shown],
        )
    if len(shown) < len(different):
        typer.echo(f"... and {len(different) - len(shown):,} more (--rows 0 lists all)")
    for side, names in zip("ab", operators.only, strict=True):
        if names:
            typer.echo(f"only in {side}: {len(names):,} operators, such as {names[0]}")
    culprit = operators.culprit
    if culprit is None:
        typer.echo(f"{operators.num_compared:,} operators are equal")
        return
    what = "gets the same bits and gives others" if culprit.inputs_are_equal else "gives other bits, and gets others"
    typer.echo(
        f"{len(different):,} of {operators.num_compared:,} operators differ; the first that {what}:\n"
        f"  {culprit.key} at {culprit.source}, rank {culprit.ranks[1]} of b"
    )


def inputs_in_words(row: "OperatorRow") -> str:
    """Whether an operator got the same in both captures."""
    return "equal" if row.inputs_are_equal else "differ"


def summary(found: "Diff") -> str:
    """One or two lines that say how a comparison ended."""
    how = f"equal within {found.tolerance:g}" if found.tolerance else "equal bit for bit"
    if not found.first:
        return f"{len(found.rows):,} tensors are {how}"
    line = f"{len(found.different):,} of {len(found.rows):,} tensors are not {how}; the first, in the order of a step:"
    row = next((row for row in found.different if row.key == found.first), None)
    if row is None:
        return f"{line}\n  {found.first}: only one of the two has it"
    return f"{line}\n  {row.key}: {row.why}{where(row)}"


def where(row: "Row") -> str:
    """The element that differs most, and who computed it."""
    if row.difference is None or not row.difference.num_unequal:
        return ""
    text = f", most at {list(row.difference.at)}" if row.difference.at else ""
    for side, (rank, microbatch) in zip("ab", row.holders, strict=True):
        if rank >= 0:
            text += f"; rank {rank}" + (f", micro-batch {microbatch}" if microbatch >= 0 else "") + f" of {side}"
    return text


def cells(row: "Row") -> tuple[str, ...]:
    """The cells of a row of the table."""
    d = row.difference
    if d is None:
        return (row.key, *[""] * (len(COLUMNS) - 2), row.why + of_statistics(row))
    ulp = "" if d.max_ulp is None else f"{d.max_ulp:,}" if d.max_ulp < 10**6 else f"{d.max_ulp:.0e}"
    return (
        row.key,
        f"{d.num_unequal:,}/{d.num_elements:,}",
        ulp,
        f"{d.relative:.1e}",
        f"{d.max_abs:.1e}",
        f"{d.slope:+.1e}",
        f"{d.worst_row[0]} ({d.worst_row[1]:.0e})",
        f"{d.worst_column[0]} ({d.worst_column[1]:.0e})",
        f"{d.num_nan[0]}/{d.num_nan[1]}" if any(d.num_nan) else "",
        "" if row.why == "differs" else row.why,
    )


def of_statistics(row: "Row") -> str:
    """What statistics say of a tensor whose hashes differ."""
    if row.statistics is None:
        return ""
    a, b = row.statistics
    nan = f", not-a-numbers {a.num_nan:,} and {b.num_nan:,}" if a.num_nan or b.num_nan else ""
    return (
        f"; root mean square {a.rms:.6g} and {b.rms:.6g}, largest {a.largest_magnitude:.6g} and "
        f"{b.largest_magnitude:.6g}{nan}"
    )


def document(found: "Diff") -> dict[str, Any]:
    """A comparison as JSON values."""
    return {
        "equal": found.is_equal,
        "first": found.first,
        "num_tensors": len(found.rows),
        "num_different": len(found.different),
        "a": {"folder": found.folders[0], "layout": found.layouts[0], "level": found.levels[0]},
        "b": {"folder": found.folders[1], "layout": found.layouts[1], "level": found.levels[1]},
        "tolerance": found.tolerance,
        "recipe": [{"key": name, "a": x, "b": y} for name, x, y in found.recipe],
        "only_a": list(found.only[0]),
        "only_b": list(found.only[1]),
        "operators": None if found.operators is None else asdict(found.operators),
        "tensors": [{name: value for name, value in asdict(row).items() if name != "map"} for row in found.rows],
    }


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows on a terminal how many are done; elsewhere nothing."""
    look = terminal(sys.stderr)
    if not look.is_tty:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True, no_color=not look.has_color), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
