"""One rank of a run, from joining the world to leaving it."""

import functools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from drumline.checkpoint import Saver
from drumline.comm import Place, World, choose_device, join, leave, read_num_threads
from drumline.precision import flush_denormals, policy
from drumline.recipe.lanes import threads_of
from drumline.recipe.sections import Recipe
from drumline.train import manifest
from drumline.train.console import ConsoleView, say
from drumline.train.folder import CHECKPOINTS, FolderLock, describe_run, run_folder
from drumline.train.journal import Journal
from drumline.train.loop import Loop
from drumline.train.peak import find_peak
from drumline.train.records import Observer
from drumline.train.setup import Parts, set_up
from drumline.train.signals import end_at_once, listen
from drumline.train.trackers import ChromeTrace, TensorBoard, TimelineFile, WeightsAndBiases, parse_range


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `done`, `preempted`, or `complete` where nothing was left to do."""

    reason: str
    step: int
    folder: Path


def run_rank(recipe: Recipe, place: Place, *, console: Console | None = None) -> Outcome:
    """Trains as one rank; every rank of the world calls this.

    Args:
        recipe: without problems for this world.
        place: this rank's.
        console: for rank 0's view; stdout when absent.

    Returns:
        How it ended, the same on every rank.

    Raises:
        DrumlineError: the folder, the data, a checkpoint or another rank refuses; a loss is not finite.
    """
    device = choose_device(recipe.run.device, place)
    if device.type == "cpu":
        share = max(1, manifest.num_cores() // place.local_world_size)
        torch.set_num_threads(threads_of(recipe) or read_num_threads() or share)
    console = console or Console(file=sys.stdout)
    folder = run_folder(recipe)
    with ExitStack() as stack, flush_denormals(), listen() as stop:
        if place.rank == 0:
            stack.callback(FolderLock(folder).release)
        with end_at_once():
            world = join(place, device, recipe.resilience.timeout_s)
        stack.callback(leave)
        notify = functools.partial(say, console) if world.is_first else _ignore
        environment = manifest.describe(world)
        # Before anything is read: it removes what a killed save left behind.
        saver = stack.enter_context(_make_saver(recipe, world, folder, environment))
        parts = set_up(recipe, world, folder, notify)
        stack.callback(parts.loader.close)
        if parts.first_step >= recipe.run.steps and parts.resumed_from is not None:
            notify(f"{folder} is complete: {parts.first_step} steps of {recipe.run.steps}; nothing to do")
            return Outcome("complete", parts.first_step, folder)
        if world.is_first:
            describe_run(folder, recipe, environment)
        peak = find_peak(recipe.metrics.peak, policy(recipe.precision).compute, world)
        observers = _make_observers(parts, folder, console, stack)
        loop = Loop(parts, observers, stop, saver, peak)
        reason = loop.run()
        return Outcome(reason, loop.step, folder)


def _make_saver(recipe: Recipe, world: World, folder: Path, environment: dict) -> Saver:
    section = recipe.checkpoint
    return Saver(
        folder / CHECKPOINTS,
        rank=world.rank,
        world_size=world.size,
        keep=section.keep,
        asynchronous=section.asynchronous,
        recipe=recipe.model_dump(mode="json"),
        environment=environment,
        timeout_s=recipe.resilience.timeout_s,
    )


def _make_observers(parts: Parts, folder: Path, console: Console, stack: ExitStack) -> Sequence[Observer]:
    recipe, observers = parts.recipe, list[Observer]()
    if recipe.run.profile:
        observers.append(ChromeTrace(folder, *parse_range(recipe.run.profile), parts.world.rank))
    if parts.world.is_first:
        observers += [Journal(folder, parts.first_step), ConsoleView(console, recipe.metrics.log_every)]
        if recipe.run.timeline:
            observers.append(TimelineFile(folder))
        if recipe.metrics.tensorboard:
            observers.append(TensorBoard(folder, parts.first_step))
        if recipe.metrics.wandb:
            config = recipe.model_dump(mode="json")
            observers.append(WeightsAndBiases(folder, recipe.metrics.wandb, folder.name, config))
    for observer in observers:
        stack.callback(observer.close)
    return observers


def _ignore(line: str) -> None:
    """Ranks other than 0 say nothing."""
