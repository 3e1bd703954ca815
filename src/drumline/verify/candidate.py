"""The layout under verification: three steps as training takes them, with everything recorded.

The parts are those of `train.assemble`, the step is `train.train_step`, rows are dealt by the loader. Only the tokens
and the first norms are made up.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from drumline.comm import World, read_place
from drumline.data import Batch, Loader
from drumline.parallel import Mesh, build_mesh, holder
from drumline.recipe.lanes import samples_of
from drumline.recipe.sections import Recipe
from drumline.train.assemble import Assembled, assemble
from drumline.train.routing import RoutingTally
from drumline.train.scalars import make_reduce_scalars
from drumline.train.state import to_piece
from drumline.train.step import StepResult, count_valid, train_step
from drumline.verify.recorded import GRADIENT, INIT, LOSS, NORM, ROUTING, WEIGHT, Part, key, scalar, write
from drumline.verify.start import fill
from drumline.verify.tokens import MadeUpRows
from drumline.verify.watch import ForwardWatch

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


def rows_of(recipe: Recipe) -> MadeUpRows:
    """The samples that a recipe is verified on."""
    return MadeUpRows(
        vocab_size=recipe.model.vocab_size,
        seq_len=recipe.data.seq_len,
        seed=recipe.run.seed,
        document_mask=recipe.data.document_mask,
        num_ahead=recipe.model.num_mtp_layers,
    )


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
        rows_of(recipe),
        global_batch=recipe.data.global_batch,
        micro_batch=recipe.data.micro_batch,
        data_rank=mesh.data_rank,
        data_degree=recipe.layout.data_degree,
        samples=samples_of(mesh.data_rank, recipe.layout.data_degree, recipe),
        share=made.share,
    )
    has_own_tokens = recipe.layout.sequence_parallel or mesh.is_first_along("tp")
    routing = RoutingTally(made.model, world.sum, counts=has_own_tokens)
    parts = _weights(made, 0, INIT)

    def note(step: int, result: StepResult, batches: Sequence[Batch]) -> None:
        parts.extend((scalar(key(step, LOSS), result.loss), scalar(key(step, NORM), result.grad_norm)))
        parts.extend(_gradients(made, step))

    watch = ForwardWatch(
        made.model, _token_numbers(recipe, mesh, made), _num_tokens(recipe), (mesh.layout.tp, mesh.coordinate("tp"))
    )
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
        )
        router = routing.finish(with_load=True)
        if router is not None and router.load is not None:
            for layer, load in zip(router.layers, router.load, strict=True):
                counts = torch.tensor(load, dtype=torch.int64)
                parts.append(Part(key(step, ROUTING, f"layers.{layer}"), tuple(counts.shape), counts, (0,)))
        parts += _weights(made, step, WEIGHT)
        if step == 1:
            parts += watch.stop()
    return parts


def _num_tokens(recipe: Recipe) -> int:
    return recipe.data.global_batch * recipe.data.seq_len


def _token_numbers(recipe: Recipe, mesh: Mesh, made: Assembled) -> list[torch.Tensor]:
    """Which tokens of the global batch this rank has in each micro-batch."""
    samples = samples_of(mesh.data_rank, recipe.layout.data_degree, recipe)
    numbers_BT = torch.arange(_num_tokens(recipe)).view(-1, recipe.data.seq_len)[samples.start : samples.stop]
    if made.share is not None:
        numbers_BT = made.share(Batch(numbers_BT, numbers_BT, None)).tokens_BT
    return list(numbers_BT.split(recipe.data.micro_batch))


def _gradients(made: Assembled, step: int) -> list[Part]:
    found = []
    for name, param in made.parameters.items():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        found.append(_part(made, key(step, GRADIENT, name), name, grad))
    return found


def _weights(made: Assembled, step: int, kind: str) -> list[Part]:
    found = [_part(made, key(step, kind, name), name, param) for name, param in made.parameters.items()]
    for name, buffer in made.buffers.items():
        found.append(Part(key(step, kind, name), tuple(buffer.shape), buffer.detach().clone(), (0,) * buffer.ndim))
    return found


def _part(made: Assembled, name: str, logical: str, tensor: torch.Tensor) -> Part:
    piece = to_piece(name, tensor, made.places[logical], made.mesh)
    return Part(name, piece.global_shape, piece.tensor.clone(), piece.offsets)
