"""`drumline numerics`: records what steps compute by logical name, and compares it."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from drumline.cli import localizing
from drumline.cli.environment import calm_threads
from drumline.cli.output import print_json, print_table
from drumline.recipe import DrumlineError, Recipe, load

numerics = typer.Typer(
    name="numerics",
    help="Capture what steps compute, compare captures, and gate them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@numerics.command()
def capture(
    recipe: Annotated[
        str, typer.Argument(help="A built-in recipe's name, a TOML file, or the recipe.json of a run or a baseline.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Dotted overrides.")] = None,
    steps: Annotated[str, typer.Option(help="Steps to record, from 1: 3, or 3,4, or 3-6.")] = "1",
    level: Annotated[
        str,
        typer.Option(
            help="hash: a hash of each tensor. stats: extremes and sums, too. tensors: all elements. ops: these, and "
            "hash and sums of every operator inside the modules of --only."
        ),
    ] = "tensors",
    only: Annotated[
        list[str] | None,
        typer.Option(help="Record only modules and parameters that match, such as 'layers.*.attention'; repeatable."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks to start here; by default as many as the layout needs.")
    ] = None,
    out: Annotated[str, typer.Option(help="Folder of the capture; by default captures/RECIPE-LAYOUT.")] = "",
    start: Annotated[str, typer.Option("--from", help="Begin from this commit, not from the first weights.")] = "",
    force_routing: Annotated[
        str, typer.Option(help="Replay the choices of experts of this capture or baseline, in every step.")
    ] = "",
) -> None:
    """Record what steps compute, by logical name, in any layout.

    Trains to the last of the steps and records in each: outputs of modules and their gradients, gradients of
    parameters, weights, optimizer states, router logits and choices, loss and gradient norm. A rank writes a file a
    step. Nothing is written into the run's own directory.
    """
    changes = overrides or []
    resolved = load(recipe, changes, command="drumline numerics capture")
    calm_threads()  # OpenMP reads its settings when torch is loaded
    from drumline.capture import LEVELS, OPS
    from drumline.cli.train import check_fits_here, check_runs_here
    from drumline.comm import read_place
    from drumline.launch import launch_local, must_launch
    from drumline.train.captured import Wanted

    if level not in LEVELS:
        raise DrumlineError(f"--level {level} is no level; there are {', '.join(LEVELS)}")
    if level == OPS:
        _require_operators_can_be_seen(resolved, only)
    wanted = Wanted(
        steps=_steps(steps, resolved),
        level=level,
        only=tuple(only or ()),
        folder=_new_folder(out or f"captures/{resolved.name}-{resolved.layout}"),
        commit=_commit(start),
        routing=Path(force_routing) if force_routing else None,
    )
    place = read_place()
    if nproc is None and place.source == "alone":
        nproc = resolved.layout.num_ranks
    command = ("drumline", "numerics", "capture", recipe, *changes)
    device = check_runs_here(resolved, nproc or place.world_size, command)
    entry = functools.partial(run_one_rank, resolved.model_dump_json(), wanted)
    if must_launch(nproc, place):
        check_fits_here(nproc or 1)
        code = launch_local(
            entry,
            nproc or 1,
            log_dir=wanted.folder / "logs",
            device=device,
            timeout_s=resolved.resilience.timeout_s,
            num_threads=resolved.run.threads,
        )
        if code:
            raise typer.Exit(code)
    else:
        entry()
    if place.rank == 0:
        _tell(wanted.folder)


@numerics.command()
def diff(
    a: Annotated[str, typer.Argument(help="A capture, taken for what is right.")],
    b: Annotated[str, typer.Argument(help="A capture of the same in another layout, precision or version.")],
    tolerance: Annotated[
        float,
        typer.Option(min=0.0, help="Relative difference (Frobenius) up to which a tensor is equal; 0: every bit."),
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    html: Annotated[str, typer.Option(help="Write a report: one HTML file that opens offline.")] = "",
    rows: Annotated[int, typer.Option(min=0, help="Tensors that differ to list; 0: all.")] = 12,
    localize: Annotated[
        bool,
        typer.Option(
            "--localize",
            help="Where they differ, run b's recipe again on a's values: which module computes otherwise, and which "
            "operator of it.",
        ),
    ] = False,
) -> None:
    """Compare two captures, tensor by tensor, in the order in which a step computes them.

    Exit code 0: nothing differs; 1: something does, and the first that does is named; 2: they cannot be compared.
    """
    calm_threads()
    from drumline.capture.diff import diff as compare
    from drumline.capture.reading import Capture
    from drumline.cli.differences import MAPS, document, progress, tell

    first, second = Capture(Path(a)), Capture(Path(b))
    with progress("tensors") as told:
        found = compare(first, second, tolerance=tolerance, num_maps=MAPS if html else 0, progress=told)
    located = localizing.locate(first, second) if localize and not found.is_equal else None
    if html:
        from drumline.report.differences import write_differences

        words = localizing.in_words(located) if located else ()
        write_differences(found, Path(html), (first.manifest, second.manifest), words)
    if as_json:
        found_where = {"localized": localizing.document(located) if located else None} if localize else {}
        print_json(document(found) | found_where)
    else:
        tell(found, rows)
        if located is not None:
            localizing.tell(located, rows)
        if html:
            typer.echo(f"{html}  (opens offline)")
    if not found.is_equal:
        raise typer.Exit(1)


@numerics.command()
def calibrate(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe's name, or a TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Dotted overrides.")] = None,
    out: Annotated[str, typer.Option(help="Folder of the baseline; by default baselines/RECIPE.")] = "",
    steps: Annotated[int, typer.Option(min=1, max=3, help="Steps that are trained.")] = 2,
) -> None:
    """Make a baseline for the gate: a small recipe in fp64, and limits from legitimate variants.

    The recipe is made small and its tokens are made up. Limits come from running it in other micro-batches, layouts,
    attentions and with recomputation, in fp32 and bf16; each is stored with the variant that set it.
    """
    resolved = load(recipe, overrides or [], command="drumline numerics calibrate")
    folder = _new_folder(out or f"baselines/{resolved.name}")
    calm_threads()
    from drumline.verify.calibrate import calibrate as run
    from drumline.verify.calibrate import limits_in_words

    made = run(resolved, folder, num_steps=steps, notify=lambda line: typer.echo(line, err=True))
    print_table(("tier", "kind", "limit", "reason"), limits_in_words(made.limits), numeric=("limit",))
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    typer.echo(f"{folder}: {len(made.keys)} tensors of {_named(steps)}, {num_bytes / 2**20:.1f} MiB; capture it by")
    typer.echo(
        f"  drumline numerics capture {folder}/recipe.json --steps {','.join(map(str, made.steps))} [layout=...]"
    )


@numerics.command()
def gate(
    captures: Annotated[list[str], typer.Argument(metavar="CAPTURE...", help="Captures of the baseline's recipe.")],
    against: Annotated[str, typer.Option(help="The baseline, as calibrate wrote it.")],
    junit: Annotated[str, typer.Option(help="Write the checks as JUnit XML.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Judge captures against a baseline, tensor by tensor.

    Tier A: errors against fp64 of a capture in fp32; B: of one in bf16; C: statistics; D: bits of replicas and of
    recomputation. Exit code 0: all pass; 1: something diverges, and the first tensor that does is named; 2: a capture
    is of another recipe; 3: drumline itself failed.
    """
    calm_threads()
    from drumline.capture.baseline import read_baseline
    from drumline.capture.gate import gate as judge
    from drumline.capture.junit import write_junit
    from drumline.capture.reading import Capture
    from drumline.cli.verdicts import document, tell

    baseline = read_baseline(Path(against))
    verdicts = [judge(Capture(Path(name)), baseline) for name in captures]
    if junit:
        write_junit(verdicts, Path(junit))
    if as_json:
        print_json(document(verdicts))
    else:
        tell(verdicts)
    if not all(verdict.passes for verdict in verdicts):
        raise typer.Exit(1)


def run_one_rank(recipe_json: str, wanted: object) -> None:
    """Records this process's rank.

    Args:
        recipe_json: the resolved recipe.
        wanted: what is recorded; a `train.captured.Wanted`.
    """
    from drumline.comm import read_place
    from drumline.train.captured import Wanted, capture_rank

    assert isinstance(wanted, Wanted)
    capture_rank(Recipe.model_validate_json(recipe_json), read_place(), wanted)


def _steps(text: str, recipe: Recipe) -> tuple[int, ...]:
    found: set[int] = set()
    for word in text.split(","):
        first, _, last = word.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise DrumlineError(f"--steps {text}: {word!r} is no step\n  try: --steps 3,4 or --steps 3-6")
        found |= set(range(int(first), int(last or first) + 1))
    if not found or min(found) < 1 or max(found) > recipe.run.steps:
        raise DrumlineError(f"--steps {text}: steps go from 1 to run.steps = {recipe.run.steps:,}")
    return tuple(sorted(found))


def _new_folder(name: str) -> Path:
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DrumlineError(f"{folder} is there already; name another folder with --out, or remove it")
    return folder


def _require_operators_can_be_seen(recipe: Recipe, only: list[str] | None) -> None:
    if not only:
        raise DrumlineError(
            "--level ops records every operator of every micro-batch, some fifty a block: say which modules are wanted"
            "\n  try: --only 'layers.*.attention'   (--only '*' is all of them)"
        )
    if recipe.run.compile:
        raise DrumlineError(
            "--level ops sees no operator inside a compiled block, which is one graph\n  try: run.compile=false"
        )
    from drumline import models
    from drumline.capture.keys import is_wanted

    if not any(name and is_wanted(name, only) for name, _ in models.build(recipe.model).named_modules()):
        raise DrumlineError(
            f"--only {' '.join(only)} matches no module of the model\n  try: --only 'layers.*.attention'"
        )


def _commit(name: str) -> Path | None:
    if name and not Path(name).is_dir():
        raise DrumlineError(
            f"--from {name} is no commit\n  try: --from runs/NAME/checkpoints/step-00000010 (drumline checkpoint list)"
        )
    return Path(name) if name else None


def _named(num_steps: int) -> str:
    return "step 1" if num_steps == 1 else f"steps 1 to {num_steps}"


def _tell(folder: Path) -> None:
    from drumline.capture.reading import Capture

    found = Capture(folder)
    num_bytes = sum(path.stat().st_size for path in folder.glob("step-*/*.safetensors"))
    steps, num_ranks = ", ".join(map(str, found.manifest.steps)), found.manifest.num_ranks
    typer.echo(
        f"{folder}: {len(found.keys):,} tensors of step {steps} by {num_ranks} rank{'s' * (num_ranks > 1)} "
        f"({found.manifest.layout}), {found.manifest.level}, {num_bytes / 2**20:,.1f} MiB"
    )
