"""One rank of a capture: the loop that trains, to the last step that is wanted, with a recorder in it.

Nothing is validated, committed or written into the run's directory.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.capture import Recorder, tokens_of
from drumline.capture.forcing import ForcedRouting, read_routing
from drumline.capture.reading import Manifest
from drumline.capture.teacher import Teacher
from drumline.comm import Place, choose_device, join, leave, read_num_threads
from drumline.precision import flush_denormals
from drumline.recipe.errors import DrumlineError
from drumline.recipe.sections import Recipe
from drumline.train import manifest
from drumline.train.assemble import subject_of
from drumline.train.loop import Loop
from drumline.train.setup import Parts, set_up
from drumline.train.signals import end_at_once, listen


@dataclass(frozen=True)
class Wanted:
    """What is to be recorded.

    Attributes:
        steps: from 1, ascending.
        level: of `capture.LEVELS`.
        only: patterns of names of modules and parameters; empty: all.
        folder: of the capture.
        commit: to begin from; None: the first weights.
        routing: a capture or baseline whose choices of experts are replayed; None: routers choose.
        teacher: a capture whose values take the place of what modules give, once that is recorded.
        noise: relative, on the teacher's values.
        teaches_state: weights and moments before the first step are the teacher's, too.
    """

    steps: tuple[int, ...]
    level: str
    only: tuple[str, ...]
    folder: Path
    commit: Path | None = None
    routing: Path | None = None
    teacher: Path | None = None
    noise: float = 0.0
    teaches_state: bool = True


def capture_rank(recipe: Recipe, place: Place, wanted: Wanted) -> None:
    """Records as one rank; every rank of the world calls this.

    Args:
        recipe: without problems for this world.
        place: this rank's.
        wanted: what is to be recorded.

    Raises:
        DrumlineError: the data or the commit cannot be used, a loss is not finite, or the capture was interrupted.
    """
    device = choose_device(recipe.run.device, place)
    if device.type == "cpu":
        share = max(1, manifest.num_cores() // place.local_world_size)
        torch.set_num_threads(recipe.run.threads or read_num_threads() or share)
    quiet = _quiet(recipe)
    with ExitStack() as stack, flush_denormals(), listen() as stop:
        with end_at_once():
            world = join(place, device, recipe.resilience.timeout_s)
        stack.callback(leave)
        parts = set_up(quiet, world, wanted.folder, _say if world.is_first else _ignore, commit=wanted.commit)
        stack.callback(parts.loader.close)
        if wanted.steps[0] <= parts.first_step:
            raise DrumlineError(
                f"step {wanted.steps[0]} is over in {wanted.commit}, which was written after step {parts.first_step}"
                f"\n  try: --steps {parts.first_step + 1}"
            )
        forced = None if wanted.routing is None else read_routing(wanted.routing)
        if forced is not None:
            trained = range(parts.first_step + 1, wanted.steps[-1] + 1)
            forced.require(trained)
            if tuple(trained) != wanted.steps:
                raise DrumlineError(
                    "routing is forced while a step is recorded, so every step that is trained must be\n"
                    f"  try: --steps {','.join(map(str, trained))}"
                )
        loop = Loop(parts, (), stop, None, None, recorder=_recorder(parts, wanted, forced), last_step=wanted.steps[-1])
        if loop.run() != "done":
            raise DrumlineError(f"interrupted after step {loop.step}; {wanted.folder} is no whole capture")
        environment = manifest.describe(world)
        world.barrier()  # every rank's files are there
        if world.is_first:
            _manifest(recipe, wanted, world.size, environment).write(wanted.folder)


def _recorder(parts: Parts, wanted: Wanted, forced: ForcedRouting | None) -> Recorder:
    return Recorder(
        subject_of(parts),
        tokens_of(parts.recipe, parts.mesh, parts.share),
        steps=wanted.steps,
        folder=wanted.folder,
        level=wanted.level,
        only=wanted.only,
        forced=forced,
        teacher=None
        if wanted.teacher is None
        else Teacher(wanted.teacher, noise=wanted.noise, with_state=wanted.teaches_state),
    )


def _quiet(recipe: Recipe) -> Recipe:
    """The recipe without what does not change numbers and would be in the way."""
    checkpoint = recipe.checkpoint.model_copy(update={"every": 0, "at_end": False})
    run = recipe.run.model_copy(update={"validation_batches": 0, "timeline": 0, "profile": ""})
    return recipe.model_copy(update={"checkpoint": checkpoint, "run": run})


def _manifest(recipe: Recipe, wanted: Wanted, num_ranks: int, environment: dict[str, Any]) -> Manifest:
    return Manifest(
        recipe=recipe.model_dump(mode="json"),
        layout=str(recipe.layout),
        level=wanted.level,
        steps=wanted.steps,
        only=wanted.only,
        num_ranks=num_ranks,
        environment=environment,
    )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _ignore(line: str) -> None:
    """Ranks other than 0 say nothing."""
