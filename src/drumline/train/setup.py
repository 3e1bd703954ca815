"""Set-up as a story: mesh, model on meta, layout applied, weights, optimizer, checkpoint, data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline import data, models
from drumline.checkpoint import Commit, DamagedCommitError, Piece, newest_commit, open_commit
from drumline.comm import World
from drumline.data import Batch, Loader
from drumline.optimizers import materialize_states
from drumline.parallel import Mesh, build_mesh, holder
from drumline.recipe.errors import DrumlineError
from drumline.recipe.lanes import samples_of
from drumline.recipe.layout import MESH_AXES
from drumline.recipe.sections import Recipe
from drumline.train.assemble import Assembled, Share, assemble
from drumline.train.folder import CHECKPOINTS
from drumline.train.resume import AnotherRunError, require_same_run
from drumline.train.state import MODEL, OPTIMIZER, buffer_pieces, model_pieces, optimizer_pieces


@dataclass(frozen=True, kw_only=True)
class Parts(Assembled):
    """Everything that the loop works with."""

    recipe: Recipe
    world: World
    loader: Loader
    validation: Sequence[Sequence[Batch]]
    data_digest: str
    first_step: int
    resumed_from: Path | None


def set_up(recipe: Recipe, world: World, folder: Path, notify: Callable[[str], None]) -> Parts:
    """Builds a run, or brings it back to its newest commit.

    Args:
        recipe: without problems for this world.
        world: joined.
        folder: the run directory.
        notify: gets a line where something takes time.

    Returns:
        All that the loop needs.

    Raises:
        DrumlineError: data or a checkpoint cannot be used; nothing has been written.
    """
    commit = _find_commit(recipe, world, folder)
    mesh = build_mesh(recipe.layout, world.device, world.rank)
    train_set, validation_set = _open_data(recipe, world, notify)
    _require_same_data(commit, train_set)

    made = assemble(recipe, mesh, world.device)
    first_step = _fill(made, commit, recipe.run.seed, world)

    loader = _loader(train_set, recipe, mesh, world, made.share, first_step=first_step)
    return Parts(
        **vars(made),
        recipe=recipe,
        world=world,
        loader=loader,
        validation=_validation_batches(validation_set, recipe, mesh, world, made.share),
        data_digest=train_set.digest,
        first_step=first_step,
        resumed_from=commit.path if commit else None,
    )


def _find_commit(recipe: Recipe, world: World, folder: Path) -> Commit | None:
    # Rank 0 chooses, so that all ranks resume from the same commit whatever they see of a shared folder.
    path = world.broadcast_object(newest_commit(folder / CHECKPOINTS) if world.is_first else None)
    if not isinstance(path, Path):
        return None
    commit = open_commit(path)
    require_same_run(commit.recipe, recipe, path)
    return commit


def _open_data(recipe: Recipe, world: World, notify: Callable[[str], None]) -> tuple[data.Dataset, data.Dataset | None]:
    # Rank 0 prepares what is not there yet; the others then find it.
    if not world.is_first:
        world.barrier()
    num_ahead = recipe.model.num_mtp_layers  # validation is of the next token alone
    train_set = data.open_dataset(recipe.data, recipe.run.seed, "train", num_ahead=num_ahead, notify=notify)
    validation_set = None
    if recipe.run.validation_batches and recipe.data.validation_fraction:
        validation_set = data.open_dataset(recipe.data, recipe.run.seed, "validation")
    if world.is_first:
        world.barrier()
    data.check_vocabulary(train_set, recipe.model.vocab_size)
    return train_set, validation_set


def _require_same_data(commit: Commit | None, train_set: data.Dataset) -> None:
    before = commit.state.get("data_digest") if commit else None
    if commit and before not in (None, train_set.digest):
        raise AnotherRunError(
            f"{commit.path} was trained on other data than {', '.join(s.path for s in train_set.sources)} holds now "
            f"(digest {before} there, {train_set.digest} here); bring the data back, or start anew with run.dir=..."
        )


def _fill(made: Assembled, commit: Commit | None, seed: int, world: World) -> int:
    """Gives weights, buffers and optimizer states their values; returns the steps already taken."""
    if commit is None:
        models.initialize(made.model, seed, holder(made.places))
        return 0
    step = commit.step
    pieces = model_pieces(made.parameters, made.places, made.mesh)
    for piece in buffer_pieces(made.buffers, made.mesh):
        piece.tensor.zero_()
        if commit.has(piece.name):  # imported weights have none: the balance begins anew
            pieces.append(piece)
    if commit.has(OPTIMIZER):
        materialize_states(made.optimizer, step)
        pieces += optimizer_pieces(made.parameters, made.places, made.optimizer, made.mesh)
    try:
        prefix = "" if commit.has(OPTIMIZER) else MODEL
        commit.read_into(pieces, prefix=prefix, elsewhere=_names_of_all_stages(pieces, made.mesh, world))
    except DamagedCommitError as error:
        raise DrumlineError(f"{error}\n  to go on from an earlier commit of the run, move this folder away") from error
    return step


def _names_of_all_stages(pieces: Sequence[Piece], mesh: Mesh, world: World) -> set[str]:
    if mesh.layout.pp == 1:
        return set()
    speaks = mesh.is_first_along(*(axis for axis in MESH_AXES if axis != "pp"))
    return {
        name for names in world.gather_objects([piece.name for piece in pieces] if speaks else []) for name in names
    }


def _loader(
    dataset: data.Dataset, recipe: Recipe, mesh: Mesh, world: World, share: Share | None, *, first_step: int = 0
) -> Loader:
    section = recipe.data
    return Loader(
        dataset,
        global_batch=section.global_batch,
        micro_batch=section.micro_batch,
        data_rank=mesh.data_rank,
        data_degree=recipe.layout.data_degree,
        samples=samples_of(mesh.data_rank, recipe.layout.data_degree, recipe),
        first_step=first_step,
        num_workers=section.num_workers,
        prefetch=section.prefetch,
        share=share,
        pin_memory=world.device.type == "cuda",
    )


def _validation_batches(
    dataset: data.Dataset | None, recipe: Recipe, mesh: Mesh, world: World, share: Share | None
) -> list[list[Batch]]:
    if dataset is None:
        return []
    loader = _loader(dataset, recipe, mesh, world, share)
    num_steps = min(recipe.run.validation_batches, dataset.num_steps(recipe.data.global_batch))
    return [loader.batches(step) for step in range(num_steps)]


def commit_state(step: int, parts: Parts) -> dict[str, Any]:
    """What a commit holds beside tensors: the position is one integer, since data order and schedule are functions
    of it.
    """
    return {
        "step": step,
        "num_samples": step * parts.recipe.data.global_batch,
        "data_digest": parts.data_digest,
    }
