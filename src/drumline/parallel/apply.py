"""The one place that applies a layout to a model, in the one order that works."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from drumline.memory import apply_activation_checkpointing
from drumline.parallel.exact import compute_in_pieces, make_exact_groups, own_exact_gradients
from drumline.parallel.gradients import Alone, Gradients, Several, layers_of
from drumline.parallel.mesh import Mesh
from drumline.parallel.place import SUMMED_OVER, Place, Places
from drumline.parallel.plan import cut_parameters
from drumline.parallel.replicate import Replicate
from drumline.parallel.shard import Sharded, shard
from drumline.parallel.tensor import spread_matmuls
from drumline.recipe.lanes import Lanes, num_blocks
from drumline.recipe.sections import Recipe

Key = TypeVar("Key")


def parallelize(
    model: nn.Module, recipe: Recipe, mesh: Mesh, *, compute_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> Places:
    """Prepares a model that is still on meta for its layout.

    Args:
        model: its parameters are replaced by sharded ones where the layout shards.
        recipe: memory, layout and run.compile are read.
        mesh: built from the recipe's layout.
        compute_dtype: that sharded parameters are gathered in.
        reduce_dtype: that sharded gradients are summed in.

    Returns:
        Where each parameter lies in its logical tensor.
    """
    # Cutting first: all that follows sees a rank's own parts only.
    blocks = num_blocks(recipe)
    places = cut_parameters(model, mesh, shares_tokens=recipe.layout.sequence_parallel, blocks=blocks)
    if blocks > 1:
        compute_in_pieces(model, mesh, recipe)
    else:
        spread_matmuls(model, mesh, recipe)
    # Checkpointing before compiling and sharding: it wraps plain modules, and a block is compiled together with its
    # recomputation.
    apply_activation_checkpointing(model, recipe.memory)
    if recipe.run.compile:
        for block in layers_of(model):
            block.compile(fullgraph=True)
    # Sharding last: its hooks gather and free parameters, and run outside of the compiled graph.
    if recipe.layout.fsdp > 1:
        sub_mesh = mesh.axes("replica", "shard")
        assert sub_mesh is not None
        shard(
            model,
            sub_mesh,
            zero=recipe.layout.zero,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            expert_mesh=mesh.expert_mesh,
        )

    return places


def own_gradients(
    model: nn.Module,
    mesh: Mesh,
    places: Places,
    *,
    lanes: Lanes | None = None,
    apart_from: Collection[nn.Parameter] = (),
) -> Gradients:
    """Chooses what brings the gradients of a parallelized, materialized model to their sum.

    Args:
        model: after `parallelize`.
        mesh: of the layout.
        places: that `parallelize` gave.
        lanes: of a run in exact mode; None: any order of summation will do.
        apart_from: parameters that it shares with another model, which owns their gradients.

    Returns:
        The gradients.
    """
    _make_groups(mesh, exact=lanes is not None)
    if lanes is not None:
        return own_exact_gradients(model, mesh, places, lanes, apart_from=apart_from)
    named = [
        (places[name], param)
        for name, param in model.named_parameters()
        if param.requires_grad and param not in apart_from
    ]
    if mesh.layout.fsdp > 1:
        counted = [param for place, param in named if place.is_first(mesh)]
        # FSDP sums over all axes of the data; along tp it knows of nothing.
        by_axes = _by(named, lambda place: tuple(axis for axis in place.partial if axis == "tp"))
        grouped = [(params, mesh.group(*axes)) for axes, params in by_axes.items()]
        unsummed = [(params, group) for params, group in grouped if group is not None]
        return Sharded(model, mesh.layout.zero, counted=counted, unsummed=unsummed)
    ways: list[Gradients] = []
    # By what all ranks of a group agree on, so that they cut the same buckets: not by whether one of them counts.
    for like, params in _by(named, lambda place: replace(place, shape=(), offsets=())).items():
        group, counts = mesh.group(*like.partial), like.is_first(mesh)
        ways.append(Alone(params, counts=counts) if group is None else Replicate(params, group, counts=counts))
    return ways[0] if len(ways) == 1 else Several(ways)


def _make_groups(mesh: Mesh, *, exact: bool) -> None:
    # All ranks make all groups in one order, also those that only other pipeline stages have parameters for.
    if exact:
        make_exact_groups(mesh)
        return
    for axes in SUMMED_OVER:
        mesh.group(*(axis for axis in axes if mesh.layout.fsdp == 1 or axis == "tp"))


def _by(named: Sequence[tuple[Place, nn.Parameter]], key: Callable[[Place], Key]) -> dict[Key, list[nn.Parameter]]:
    """Parameters by what their places have in common, each list in the order of the forward."""
    found: dict[Key, list[nn.Parameter]] = {}
    for place, param in named:
        found.setdefault(key(place), []).append(param)
    return found
