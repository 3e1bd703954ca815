"""`drumline train`: one command alone, on local ranks, and as one rank under torchrun or SLURM."""

import functools
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from drumline.cli.environment import calm_threads, terminal
from drumline.cluster import accelerator_names
from drumline.recipe import Machine, Recipe, RecipeError, check, load
from drumline.recipe.errors import DrumlineError
from drumline.recipe.lanes import threads_of

if TYPE_CHECKING:
    from drumline.comm import Place

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
    options = ("--nproc", str(nproc)) if nproc is not None else ()
    resolved = _load(recipe, changes, nproc, options)
    # OpenMP reads its settings when torch is loaded.
    calm_threads()
    from drumline.comm import read_place
    from drumline.launch import must_launch
    from drumline.train import run_folder

    place = read_place()
    world_size = _world_size(nproc, place)
    if nproc is None and place.source == "alone":
        nproc = resolved.layout.num_ranks
    launches = must_launch(nproc, place)
    device = check_runs_here(resolved, world_size, ("drumline", "train", recipe, *changes, *options))
    entry = functools.partial(run_one_rank, resolved.model_dump_json(), as_json)
    if not launches:
        entry()
        return
    check_fits_here(nproc or 1)
    from drumline.launch import launch_local

    code = launch_local(
        entry,
        nproc or 1,
        log_dir=run_folder(resolved) / "logs",
        device=device,
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


def check_fits_here(num_ranks: int) -> None:
    """Refuses more ranks than this machine can hold."""
    from drumline.train.manifest import num_cores

    cores = num_cores()
    if num_ranks > MAX_RANKS_A_CORE * cores:
        raise DrumlineError(
            f"{num_ranks:,} ranks are too many for this machine of {cores} cores; start them on several machines "
            f"under torchrun or srun, or try fewer here\n  try: layout=dp{cores}"
        )


def check_runs_here(recipe: Recipe, world_size: int | None, command: Sequence[str]) -> str:
    """Refuses a recipe that cannot run in a world, or on this machine's devices.

    Args:
        recipe: resolved.
        world_size: ranks that there are or will be; None: as many as the layout needs.
        command: what the user typed, for lines to try.

    Returns:
        The kind of device that it runs on.
    """
    check(recipe, **vars(_machine(recipe.run.device, world_size)), command=command)
    return _device(recipe.run.device)


def _load(recipe: str, changes: Sequence[str], nproc: int | None, options: Sequence[str]) -> Recipe:
    try:
        return load(recipe, changes, command="drumline train", options=options)
    except RecipeError:
        # What is offered must also work here; to know this machine takes torch, which a good recipe loads later.
        from drumline.comm import read_place

        machine = _machine("auto", _world_size(nproc, read_place()))
        return load(recipe, changes, command="drumline train", options=options, machine=machine)


def _world_size(nproc: int | None, place: "Place") -> int | None:
    """Ranks that were asked for; None where there are as many as the layout needs."""
    return nproc if nproc is not None or place.source == "alone" else place.world_size


def _device(wanted: str) -> Literal["cpu", "cuda"]:
    import torch

    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def _machine(wanted_device: str, world_size: int | None) -> Machine:
    import torch

    device = _device(wanted_device)
    has_bf16 = device == "cpu" or torch.cuda.is_bf16_supported()
    return Machine(world_size, device, has_bf16, accelerator_names())
