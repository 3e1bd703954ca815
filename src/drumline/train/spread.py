"""A model spread as a layout says: built on meta, parallelized, given memory, and joined again to what a step asks for.

Without pipeline parallelism there is one part, which is the whole model; with it a rank has some stages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from drumline.models import Decoder, Part
from drumline.parallel import Gradients, Mesh, Places, clear_padding, own_gradients, parallelize
from drumline.parallel.pipeline import (
    Stages,
    choose_schedule,
    cut,
    joined_places,
    make_pipeline,
    own_stage_gradients,
    share_embedding,
)
from drumline.precision import Policy
from drumline.recipe.lanes import lanes
from drumline.recipe.sections import Recipe
from drumline.train.step import InTurn, Passes

Build = Callable[[Part | None], Decoder]


@dataclass(frozen=True)
class Spread:
    """A rank's share of a model.

    Attributes:
        model: its parameters have memory and no values yet.
        places: where each lies in its logical tensor.
        gradients: what brings them to their sum.
        passes: takes micro-batches through the model.
    """

    model: nn.Module
    places: Places
    gradients: Gradients
    passes: Passes


def spread(recipe: Recipe, mesh: Mesh, build: Build, dtypes: Policy, device: torch.device) -> Spread:
    """Spreads a model.

    Args:
        recipe: without problems.
        mesh: of its layout.
        build: builds a part of the model on meta; None: all of it.
        dtypes: of the recipe.
        device: of this rank.

    Returns:
        This rank's share.

    Raises:
        DrumlineError: the pipeline's schedule cannot be used.
    """
    # In exact mode sharding gathers what one device has, so that gradients are rounded where they are there.
    gathered = torch.float32 if lanes(recipe) is not None else dtypes.compute
    prepare = partial(parallelize, recipe=recipe, mesh=mesh, compute_dtype=gathered, reduce_dtype=dtypes.reduce)
    if recipe.layout.pp > 1:
        return _in_stages(recipe, mesh, build, prepare, dtypes.compute, device)
    model = build(None)
    places = prepare(model)
    model.to_empty(device=device)
    clear_padding(model, places)
    gradients = own_gradients(model, mesh, places, lanes=lanes(recipe))
    return Spread(model, places, gradients, InTurn(model, gradients))


def _in_stages(
    recipe: Recipe,
    mesh: Mesh,
    build: Build,
    prepare: Callable[[nn.Module], Places],
    hidden_dtype: torch.dtype,
    device: torch.device,
) -> Spread:
    num_microbatches = recipe.data.global_batch // (recipe.data.micro_batch * recipe.layout.data_degree)
    rank, is_tied = mesh.coordinate("pp"), recipe.model.shares_embedding
    schedule, wanted = cut(recipe, rank, num_microbatches)
    parts = {stage: build(part) for stage, part in wanted.items()}
    places = joined_places([prepare(part) for part in parts.values()], recipe.model, schedule.placement)
    model = Stages(list(parts.values()))
    model.to_empty(device=device)
    if is_tied and {0, schedule.num_stages - 1} <= parts.keys():
        share_embedding(parts[0], parts[schedule.num_stages - 1])
    clear_padding(model, places)
    gradients, each = own_stage_gradients(model, mesh, places, schedule.placement, is_tied=is_tied, lanes=lanes(recipe))
    pipeline = make_pipeline(
        parts,
        each,
        mesh,
        schedule=partial(choose_schedule, recipe.layout),
        placement=schedule.placement,
        hidden=(recipe.model.dim, hidden_dtype),
    )
    return Spread(model, places, gradients, pipeline)
