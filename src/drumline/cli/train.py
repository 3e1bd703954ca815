"""`drumline train`: one command alone, on local ranks, and as one rank under torchrun or SLURM."""

import functools
import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from drumline.cli.environment import calm_threads, terminal
from drumline.cluster import accelerator_names
from drumline.recipe import Recipe, check, load
from drumline.recipe.errors import DrumlineError
from drumline.recipe.lanes import threads_of

MAX_RANKS_A_CORE = 32  # more only fill the memory; a few a core are how layouts are tried on a laptop


def train(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe's name, or a TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Dotted overrides.")] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Start this many ranks on this machine; by default as many as the layout needs.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document at the end; the rest goes to stderr.")
    ] = False,
) -> None:
    """Train a recipe, on one rank or many, and go on where it stopped.

    The same command resumes, from the newest commit in the run directory. Ctrl-C and SIGTERM finish the step, commit
    and exit. Under torchrun or SLURM the command takes its place from the environment.
    """
    changes = overrides or []
    resolved = load(recipe, changes, command="drumline train")
    # OpenMP reads its settings when torch is loaded.
    calm_threads()
    from drumline.comm import read_place
    from drumline.launch import must_launch
    from drumline.train import run_folder

    place = read_place()
    if nproc is None and place.source == "alone":
        nproc = resolved.layout.num_ranks
    launches = must_launch(nproc, place)
    _check(resolved, nproc or place.world_size, ("drumline", "train", recipe, *changes))
    entry = functools.partial(run_one_rank, resolved.model_dump_json(), as_json)
    if not launches:
        entry()
        return
    _check_fits_here(nproc or 1)
    from drumline.launch import launch_local

    code = launch_local(
        entry,
        nproc or 1,
        log_dir=run_folder(resolved) / "logs",
        device=_device(resolved),
        max_restarts=resolved.resilience.max_restarts,
        timeout_s=resolved.resilience.timeout_s,
        num_threads=threads_of(resolved),
    )
    if code:
        raise typer.Exit(code)


def run_one_rank(recipe_json: str, as_json: bool) -> None:
    """Runs this process's rank; rank 0 tells how it ended.

    Args:
        recipe_json: the resolved recipe.
        as_json: print one JSON document on stdout and all else on stderr.
    """
    from rich.console import Console

    from drumline.comm import read_place
    from drumline.train import run_rank

    place = read_place()
    stream = sys.stderr if as_json else sys.stdout
    console = Console(file=stream, no_color=not terminal(stream).has_color)
    outcome = run_rank(Recipe.model_validate_json(recipe_json), place, console=console)
    if as_json and place.rank == 0:
        sys.stdout.write(
            json.dumps({"reason": outcome.reason, "step": outcome.step, "run_dir": str(outcome.folder)}) + "\n"
        )


def _check_fits_here(num_ranks: int) -> None:
    from drumline.train.manifest import num_cores

    cores = num_cores()
    if num_ranks > MAX_RANKS_A_CORE * cores:
        raise DrumlineError(
            f"{num_ranks:,} ranks are too many for this machine of {cores} cores; start them on several machines "
            f"under torchrun or srun, or try fewer here\n  try: layout=dp{cores}"
        )


def _device(recipe: Recipe) -> str:
    import torch

    return "cuda" if recipe.run.device != "cpu" and torch.cuda.is_available() else "cpu"


def _check(recipe: Recipe, world_size: int, command: Sequence[str]) -> None:
    import torch

    device = _device(recipe)
    check(
        recipe,
        world_size=world_size,
        device="cuda" if device == "cuda" else "cpu",
        has_bf16=device == "cpu" or torch.cuda.is_bf16_supported(),
        accelerators=accelerator_names(),
        command=command,
    )
