"""`drumline checkpoint`: list, inspect, verify, compare and convert commits. A run stands for its commits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from drumline.cli.output import print_json, print_table
from drumline.recipe.errors import DrumlineError

checkpoint = typer.Typer(
    help="List, inspect, verify, compare and convert checkpoints.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Commit = Annotated[Path, typer.Argument(metavar="PATH", help="A commit, or a run (its newest commit).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

_MOST_SHOWN = 20


@checkpoint.command("list")
def list_commits(run: Run, json: Json = False) -> None:
    """List the commits of a run, whole or not."""
    from drumline.checkpoint.folder import Folder, commits_directory
    from drumline.checkpoint.summary import describe_found, describe_unfinished, is_commit, run_of

    if run.is_dir() and is_commit(run):
        raise DrumlineError(
            f"{run} is a commit; list takes the run that it is of\n"
            f"  try: drumline checkpoint list {run_of(run)}\n"
            f"  or, for what this commit holds: drumline checkpoint inspect {run}"
        )
    folder = Folder(commits_directory(run))
    rows = [describe_found(found) for found in folder.found()] + describe_unfinished(folder.path)
    if json:
        print_json({"directory": str(folder.path), "commits": rows})
        return
    if not rows:
        typer.echo(f"no commits in {folder.path}")
        return
    columns = ("step", "folder", "size", "tensors", "layout", "written", "status")
    cells = (
        (
            str(row["step"]),
            row["folder"],
            _size(row["num_bytes"]),
            _count(row["num_tensors"]),
            row["layout"] or "-",
            _date(row["created"]),
            row["status"],
        )
        for row in rows
    )
    print_table(columns, cells, numeric=("step", "size", "tensors"))


@checkpoint.command()
def inspect(
    path: Commit,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json: Json = False,
) -> None:
    """Show what a commit holds."""
    from drumline.checkpoint.summary import describe_commit, describe_tensors, find_commit

    commit = find_commit(path)
    document = describe_commit(commit)
    if json:
        print_json(document | ({"tensors": describe_tensors(commit)} if tensors else {}))
        return
    shown = {
        "path": document["path"],
        "step": str(document["step"]),
        "written": _date(document["created"]),
        "layout": f"{document['layout'] or '-'}, written by {document['world_size']} ranks",
        "size": f"{_size(document['num_bytes'])} in {document['num_files']} files",
        "recipe": document["recipe_name"] or "-",
        **{f"state.{key}": str(value) for key, value in document["state"].items()},
        **{f"environment.{key}": str(value) for key, value in document["environment"].items() if value is not None},
    }
    width = max(len(key) for key in shown)
    for key, value in shown.items():
        typer.echo(f"{key.ljust(width)}  {value}")
    typer.echo("")
    groups = (
        (group["group"], f"{group['num_tensors']:,}", f"{group['num_elements']:,}", _size(group["num_bytes"]))
        for group in document["groups"]
    )
    print_table(("group", "tensors", "elements", "size"), groups, numeric=("tensors", "elements", "size"))
    if tensors:
        typer.echo("")
        rows = (
            (row["name"], row["dtype"], str(row["shape"]), _size(row["num_bytes"]), str(row["num_pieces"]))
            for row in describe_tensors(commit)
        )
        print_table(("tensor", "dtype", "shape", "size", "pieces"), rows, numeric=("size", "pieces"))


@checkpoint.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A commit, or a run (all its commits).")],
    json: Json = False,
) -> None:
    """Read every byte and check it; exit 1 where something was changed, cut off or lost."""
    from drumline.checkpoint.folder import Folder, commits_directory
    from drumline.checkpoint.summary import is_commit
    from drumline.checkpoint.verifying import size_of, verify

    paths = [path] if is_commit(path) else [found.path for found in Folder(commits_directory(path)).found()]
    verdicts = []
    for commit in paths:
        with _progress(f"verify {commit.name}", size_of(commit)) as advance:
            verdicts.append(verify(commit, advance))
        if not json:
            _print_verdict(verdicts[-1])
    if json:
        print_json({"whole": all(not v.damages for v in verdicts), "commits": [_verdict_row(v) for v in verdicts]})
    elif not paths:
        typer.echo(f"no commits in {path}")
    if any(verdict.damages for verdict in verdicts):
        raise typer.Exit(1)


@checkpoint.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A commit, or a run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    step: Annotated[
        int | None, typer.Option(help="Which step of the runs; by default the newest that both have.")
    ] = None,
    prefix: Annotated[str, typer.Option(help="Compare only tensors whose names start so, such as `model.`.")] = "",
    json: Json = False,
) -> None:
    """Compare weights and optimizer states bit for bit; exit 1 where they differ."""
    from drumline.checkpoint.comparing import compare
    from drumline.checkpoint.summary import choose_pair, num_bytes_under

    one, other = choose_pair(a, b, step)
    names = {*one.names, *other.names}
    num_tensors = sum(name.startswith(prefix) for name in names)
    if not num_tensors:
        starts = ", ".join(sorted({name.split(".")[0] + "." for name in names}))
        raise DrumlineError(f"no tensor's name starts with {prefix!r}; they start with {starts or 'nothing'}")
    num_bytes = num_bytes_under(one, prefix)
    with _progress("compare", num_bytes) as advance:
        found = list(compare(one, other, prefix=prefix, progress=advance))
    if json:
        print_json(
            {
                "equal": not found,
                "a": str(one.path),
                "b": str(other.path),
                "step_a": one.step,
                "step_b": other.step,
                "num_tensors": num_tensors,
                "num_bytes": num_bytes,
                "differences": [vars(difference) for difference in found],
            }
        )
    elif not found:
        typer.echo(f"equal, bit for bit: {num_tensors:,} tensors, {_size(num_bytes)}")
        typer.echo(f"  A  {one.path}\n  B  {other.path}")
    else:
        typer.echo(f"{len(found):,} of {num_tensors:,} tensors differ")
        typer.echo(f"  A  {one.path}\n  B  {other.path}")
        rows = (
            (
                difference.name,
                difference.kind,
                "-"
                if difference.num_different is None
                else f"{difference.num_different:,} of {difference.num_elements:,}",
                difference.detail if difference.max_abs is None else f"{difference.max_abs:.3g}",
            )
            for difference in found[:_MOST_SHOWN]
        )
        print_table(("tensor", "differs in", "elements", "max |A - B|"), rows, numeric=("elements",))
        if len(found) > _MOST_SHOWN:
            typer.echo(f"and {len(found) - _MOST_SHOWN:,} more (--json lists all)")
    if found:
        raise typer.Exit(1)


@checkpoint.command("export")
def export(
    path: Commit,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.")],
    to: Annotated[Literal["hf"], typer.Option("--to", help="hf: config.json and safetensors for transformers.")] = "hf",
    dtype: Annotated[Literal["as-stored", "fp32", "bf16"], typer.Option(help="Dtype of the weights.")] = "as-stored",
    json: Json = False,
) -> None:
    """Write the weights as a Hugging Face folder."""
    import torch

    from drumline.checkpoint.conversion import export_commit
    from drumline.checkpoint.summary import find_commit, num_bytes_under

    commit = find_commit(path)
    with _progress("export", num_bytes_under(commit, "model.")) as advance:
        wanted = {"as-stored": None, "fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        files = export_commit(commit, folder, dtype=wanted, progress=advance)
    if json:
        print_json({"format": to, "step": commit.step, "folder": str(folder), "files": [file.name for file in files]})
    else:
        typer.echo(f"step {commit.step} of {commit.path} written to {folder}: {', '.join(file.name for file in files)}")


@checkpoint.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="A folder with config.json and safetensors.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory that has no commits yet.")],
    json: Json = False,
) -> None:
    """Make step 0 of a run from a Hugging Face folder; `drumline train ... run.dir=RUN` starts from it."""
    from drumline.checkpoint.conversion import import_huggingface

    path = import_huggingface(source, run)
    if json:
        print_json({"path": str(path), "step": 0})
    else:
        typer.echo(f"{source} imported as {path}; to train from it: drumline train RECIPE run.dir={run}")


@contextmanager
def _progress(stage: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    from drumline.cli.progress import Meter

    done_bytes = 0

    def advance(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        meter.show(stage, done_bytes, total_bytes)

    with Meter(stage, "tensors") as meter:
        yield advance


def _print_verdict(verdict: Any) -> None:
    if not verdict.damages:
        size = _size(verdict.num_bytes)
        typer.echo(f"whole: {verdict.path} ({verdict.num_files} files, {verdict.num_tensors:,} tensors, {size})")
    else:
        typer.echo(f"damaged: {verdict.path}")
        for damage in verdict.damages[:_MOST_SHOWN]:
            typer.echo(f"  {damage}")
        if len(verdict.damages) > _MOST_SHOWN:
            typer.echo(f"  and {len(verdict.damages) - _MOST_SHOWN:,} more (--json lists all)")
    for name in verdict.strangers:
        typer.echo(f"  note: {name} is no part of the commit")


def _verdict_row(verdict: Any) -> dict[str, Any]:
    return vars(verdict) | {
        "path": str(verdict.path),
        "whole": not verdict.damages,
        "damages": [vars(damage) for damage in verdict.damages],
    }


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "-"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _date(seconds: float | None) -> str:
    import datetime

    if seconds is None:
        return "-"
    return datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
