"""The layout under verification: three steps as training takes them, with everything recorded.

The parts are those of `train.assemble`, the step is `train.train_step`, rows are dealt by the loader. Only the tokens
and the first norms are made up.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from drumline.capture import tokens_of
from drumline.capture.files import write
from drumline.capture.keys import FORWARD, INIT, LOSS, NORM, ROUTING, WEIGHT, key
from drumline.capture.parts import Part
from drumline.capture.sink import Parts
from drumline.capture.snapshot import add_gradients, add_weights
from drumline.capture.watch import ActivationWatch
from drumline.comm import World, read_place
from drumline.data import Batch, Loader
from drumline.data.made_up import made_up
from drumline.parallel import build_mesh, holder
from drumline.recipe.lanes import samples_of
from drumline.recipe.sections import Recipe
from drumline.train.assemble import assemble, subject_of
from drumline.train.routing import RoutingTally
from drumline.train.scalars import make_reduce_scalars
from drumline.train.step import StepResult, count_valid, train_step
from drumline.verify.start import fill

NUM_STEPS = 3


def record_rank(recipe: Recipe, folder: Path, num_steps: int = NUM_STEPS) -> None:
    """Runs this process's rank of a layout and writes what it saw into `folder`.

    Args:
        recipe: small, without problems for the world that was joined.
        folder: gets `rank-N.safetensors`.
        num_steps: to train.
    """
    world = World(read_place(), torch.device("cpu"))
    parts = record(recipe, world, num_steps)
    write(parts, folder / f"rank-{world.rank}.safetensors")


def record(recipe: Recipe, world: World, num_steps: int = NUM_STEPS) -> list[Part]:
    """Trains some steps.

    Args:
        recipe: small, without problems for this world.
        world: joined.
        num_steps: to train.

    Returns:
        This rank's parts of everything.
    """
    mesh = build_mesh(recipe.layout, world.device, world.rank)
    made = assemble(recipe, mesh, world.device)
    fill(made.model, recipe.run.seed, holder(made.places))
    loader = Loader(
        made_up(recipe.data, recipe.run.seed, recipe.model),
        global_batch=recipe.data.global_batch,
        micro_batch=recipe.data.micro_batch,
        data_rank=mesh.data_rank,
        data_degree=recipe.layout.data_degree,
        samples=samples_of(mesh.data_rank, recipe.layout.data_degree, recipe),
        share=made.share,
    )
    has_own_tokens = recipe.layout.sequence_parallel or mesh.is_first_along("tp")
    routing = RoutingTally(made.model, world.sum, counts=has_own_tokens)
    subject, sink = subject_of(made), Parts()
    add_weights(sink, subject, 0, INIT)

    def note(step: int, result: StepResult, batches: Sequence[Batch]) -> None:
        sink.add_scalar(key(step, LOSS), result.loss)
        sink.add_scalar(key(step, NORM), result.grad_norm)
        add_gradients(sink, subject, step)

    watch = ActivationWatch(made.model, tokens_of(recipe, mesh, made.share), sink, kinds=(FORWARD,))
    watch.start(1)
    for step in range(1, num_steps + 1):
        batches = loader.batches(step - 1)
        num_tokens = int(world.sum([count_valid(batches, mesh)], torch.int64)[0])
        train_step(
            batches,
            num_tokens,
            recipe.optimizer.lr,
            passes=made.passes,
            gradients=made.gradients,
            optimizer=made.optimizer,
            max_grad_norm=recipe.optimizer.max_grad_norm,
            reduce_scalars=make_reduce_scalars(world, mesh, exact=recipe.numerics.mode == "exact"),
            check_finite=functools.partial(note, step),
            on_routed=routing.add if routing.has_experts else None,
            watch=watch if step == 1 else None,
        )
        watch.stop()
        router = routing.finish(with_load=True)
        if router is not None and router.load is not None:
            for layer, load in zip(router.layers, router.load, strict=True):
                counts = torch.tensor(load, dtype=torch.int64)
                sink.add(key(step, ROUTING, f"layers.{layer}"), tuple(counts.shape), counts, offsets=(0,))
        add_weights(sink, subject, step, WEIGHT)
    return sink.take()
