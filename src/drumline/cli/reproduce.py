"""`drumline reproduce`: runs a recorded run again, and says where the first bit differs."""

import functools
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drumline.cli.environment import calm_threads, terminal
from drumline.cli.output import print_json, print_table
from drumline.recipe import CheckFailed, DrumlineError, Recipe, check

if TYPE_CHECKING:
    from drumline.train.replay import Plan, Recorded, Verdict

MAX_ROWS = 40


def reproduce(
    run: Annotated[Path, typer.Argument(help="The directory of a run, such as runs/NAME.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes of how the run is spread, such as layout=dp2."),
    ] = None,
    steps: Annotated[str, typer.Option(help="The first N, or START:STOP; all that were recorded by default.")] = "",
    nproc: Annotated[
        int | None, typer.Option(help="Ranks to start on this machine; by default as many as the layout needs.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the replay's folder here; it must be new.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run a recorded run again, and say where its first bit differs.

    The replay takes the run's own recipe, from the seed or from the newest commit before the first wanted step, and
    writes into a folder of its own. Exit code 0: all bits are the same; 1: some differ; 2: it cannot be replayed.
    """
    calm_threads()  # OpenMP reads its settings when torch is loaded
    from drumline.comm import read_place
    from drumline.train import replay

    if read_place().source != "alone":
        raise DrumlineError("drumline reproduce starts its ranks itself; call it once, not under torchrun or srun")
    recorded = replay.read_recorded(run)
    with tempfile.TemporaryDirectory(prefix="drumline-reproduce-") as scratch:
        folder = Path(scratch) / "replay" if keep is None else keep
        plan = replay.plan(recorded, replay.parse_steps(steps), overrides or [], folder)
        check(plan.recipe, world_size=nproc or plan.recipe.layout.num_ranks)
        replay.prepare(folder, plan.commit)
        where = "the seed" if plan.commit is None else str(plan.commit)
        sys.stderr.write(f"replaying steps {plan.first} to {plan.last} of {run} from {where}\n")
        _run(plan, folder)
        verdict = replay.compare(recorded, replay.read_recorded(folder), plan.first, plan.last)
    _tell(recorded, plan, verdict, as_json)


def replay_rank(recipe_json: str) -> None:
    """Runs this process's rank; what rank 0 has to say goes to stderr.

    Args:
        recipe_json: the replay's resolved recipe.
    """
    from rich.console import Console

    from drumline.comm import read_place
    from drumline.train import run_rank

    console = Console(file=sys.stderr, no_color=not terminal(sys.stderr).has_color)
    run_rank(Recipe.model_validate_json(recipe_json), read_place(), console=console)


def _run(plan: "Plan", folder: Path) -> None:
    import torch

    from drumline.launch import launch_local

    recipe = plan.recipe
    entry = functools.partial(replay_rank, recipe.model_dump_json())
    if recipe.layout.num_ranks == 1:
        entry()
        return
    code = launch_local(
        entry,
        recipe.layout.num_ranks,
        log_dir=folder / "logs",
        device="cuda" if recipe.run.device != "cpu" and torch.cuda.is_available() else "cpu",
        timeout_s=recipe.resilience.timeout_s,
        num_threads=recipe.run.threads,
    )
    if code:
        raise typer.Exit(code)


def _tell(recorded: "Recorded", plan: "Plan", verdict: "Verdict", as_json: bool) -> None:
    first = next((step for step in verdict.steps if step.differs), None)
    notes = [] if first is None else _notes(recorded, plan)
    if as_json:
        print_json(_document(recorded, plan, verdict, notes))
    else:
        _print(verdict, notes)
    total = len(verdict.steps)
    if first is not None:
        raise CheckFailed(
            f"{verdict.num_different} of {total} steps differ; the first is step {first.step}: {first.verdict}"
        )
    if not as_json:
        sys.stdout.write(f"same: {total} of {total} steps, bit for bit\n")


def _notes(recorded: "Recorded", plan: "Plan") -> list[str]:
    """What may explain a difference beside the environment."""
    layouts = {str(row.get("layout")) for row in recorded.starts}
    others = sorted(layouts - {str(plan.recipe.layout)})
    if not others or plan.recipe.numerics.mode == "exact":
        return []
    return [
        f"steps were recorded under {', '.join(others)} and replayed under {plan.recipe.layout}: layouts add up in "
        "different orders"
    ]


def _print(verdict: "Verdict", notes: list[str]) -> None:
    rows = []
    for step in verdict.steps:
        for side, values in (("there", step.there), ("here", step.here)) if step.differs else (("both", step.there),):
            cells = [values.get(name, "") for name in ("loss", "grad_norm")]
            rows.append([str(step.step), side, *cells, "" if side == "there" else step.verdict])
    if len(rows) > MAX_ROWS:
        left = next((i for i, row in enumerate(rows) if row[1] == "there"), len(rows) - MAX_ROWS // 2)
        shown = rows[: MAX_ROWS // 2], rows[max(MAX_ROWS // 2, left) :][: MAX_ROWS // 2]
        rows = [*shown[0], ["...", "", "", "", f"{len(rows) - sum(map(len, shown))} rows more: --json"], *shown[1]]
    print_table(("step", "side", "loss", "grad norm", "verdict"), rows, numeric=("step",))
    for key, there, here in verdict.environment:
        sys.stdout.write(f"environment: {key} was {there}, is {here}\n")
    if not verdict.environment:
        sys.stdout.write("environment: nothing that may decide bits differs\n")
    for note in notes:
        sys.stdout.write(f"note: {note}\n")


def _document(recorded: "Recorded", plan: "Plan", verdict: "Verdict", notes: list[str]) -> dict[str, Any]:
    return {
        "run": str(recorded.folder),
        "from": None if plan.commit is None else str(plan.commit),
        "layout": str(plan.recipe.layout),
        "same": not verdict.num_different,
        "steps": [
            {
                "step": step.step,
                "same": not step.differs,
                "verdict": step.verdict,
                "there": step.there,
                "here": step.here,
            }
            for step in verdict.steps
        ],
        "environment": [{"key": key, "there": there, "here": here} for key, there, here in verdict.environment],
        "notes": notes,
    }
