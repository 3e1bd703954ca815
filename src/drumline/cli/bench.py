"""`drumline bench`: measures on this machine what drumline claims of its operators."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drumline.cli.environment import calm_threads
from drumline.cli.output import print_json, print_table
from drumline.recipe.errors import CheckFailed, DrumlineError

if TYPE_CHECKING:
    from drumline.numerics.invariant.probe import Cost, Found

bench = typer.Typer(
    help="Measure on this machine what drumline claims of its operators.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
)

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@bench.callback()
def _bench() -> None:
    """Keeps `invariance` a command of its own, also while it is the only one."""


@bench.command("invariance")
def bench_invariance(
    op: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An operator, any number of times; by default all.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(metavar="DTYPE", help="fp32 or bf16, any number of times; by default both.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes, fewer rounds of timing.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Print what is known of every operator, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Look for operators whose bits change with batch, position, chunks or threads.

    Each of drumline's invariant operators runs on whole inputs and in other circumstances, forward and backward, and
    bits are compared; torch's operator of that name beside it, for contrast. The cost is the time of forward and
    backward over torch's. Exit code 1 if one of drumline's moved.
    """
    calm_threads()  # OpenMP reads its settings when torch is loaded
    if listing:
        _list(as_json)
        return
    from drumline.numerics.invariant.probe import NAMES

    names, dtypes = _chosen("--op", op, NAMES), _chosen("--dtype", dtype, tuple(_DTYPES))
    rows = list(_measured(names, dtypes, quick))
    if as_json:
        print_json({"operators": rows, **_where()})
    else:
        columns = ("operator", "dtype", "class", "outputs", "moved", "torch's moved", "by", "cost", "of")
        print_table(columns, map(_cells, rows), numeric=("outputs", "moved", "torch's moved", "cost"))
    moved = [f"{row['operator']} in {row['dtype']}" for row in rows if row["moved"]]
    if moved:
        raise CheckFailed(
            f"bits moved in {', '.join(moved)}: do not rely on them on this machine, and please report it with --json"
        )


def _chosen(option: str, wanted: list[str] | None, known: tuple[str, ...]) -> list[str]:
    for name in wanted or ():
        if name not in known:
            raise DrumlineError(f"{option} {name} is not known\n  what works: {', '.join(known)}")
    return list(dict.fromkeys(wanted or known))


def _measured(names: list[str], dtypes: list[str], quick: bool) -> Iterator[dict[str, Any]]:
    import torch

    from drumline.numerics.invariant import classify
    from drumline.numerics.invariant.probe import cost, probe

    for name in names:
        for dtype in dtypes:
            sys.stderr.write(f"probing {name} in {dtype}\n" if sys.stderr.isatty() else "")
            torch_dtype = getattr(torch, _DTYPES[dtype])
            own = probe(name, torch_dtype, quick)
            others = probe(name, torch_dtype, quick, of_torch=True)
            price = cost(name, torch_dtype, rounds=3 if quick else 9)
            kind = "probed" if name == "elementwise" else classify(f"drumline::invariant_{_operator(name)}").kind
            yield _row(name, dtype, kind, own, others, price)


def _operator(name: str) -> str:
    """The torch operator that does a function's work."""
    work = {"linear": "matmul", "log_softmax": "softmax", "mean": "sum", "embedding": "embedding_backward"}
    return work.get(name, name)


def _row(name: str, dtype: str, kind: str, own: "Found", others: "Found", price: "Cost | None") -> dict[str, Any]:
    return {
        "operator": name,
        "dtype": dtype,
        "class": kind,
        "outputs": own.num_outputs,
        "moved": own.num_moved,
        "moved_by": own.moved_by,
        "torch_outputs": others.num_outputs,
        "torch_moved": others.num_moved,
        "torch_moved_by": others.moved_by,
        "cost_ratio": None if price is None else price.ratio,
        "own_s": None if price is None else price.own_s,
        "torch_s": None if price is None else price.torch_s,
        "cost_of": None if price is None else price.shape,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ratio = row["cost_ratio"]
    return (
        row["operator"],
        row["dtype"],
        row["class"],
        f"{row['outputs']:,}",
        f"{row['moved']:,}",
        f"{row['torch_moved']:,}",
        ", ".join(sorted({*row["moved_by"], *row["torch_moved_by"]})) or "-",
        "-" if ratio is None else f"{ratio:.2f}x",
        row["cost_of"] or "-",
    )


def _where() -> dict[str, Any]:
    import platform

    import torch

    from drumline.numerics.invariant.native import forms

    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "forms": forms(),
    }


def _list(as_json: bool) -> None:
    from drumline.numerics.invariant import OPERATORS

    rows = [(name, e.kind, e.why, e.instead) for name, e in sorted(OPERATORS.items(), key=lambda x: (x[1].kind, x[0]))]
    if as_json:
        print_json([dict(zip(("operator", "class", "why", "instead"), row, strict=True)) for row in rows])
    else:
        print_table(("operator", "class", "why", "what works"), rows)
