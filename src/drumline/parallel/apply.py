"""The one place that applies a layout to a model, in the one order that works."""

import torch
from torch import nn

from drumline.memory import apply_activation_checkpointing
from drumline.parallel.gradients import Alone, Gradients, layers_of
from drumline.parallel.mesh import Mesh
from drumline.parallel.replicate import Replicate
from drumline.parallel.shard import Sharded, shard
from drumline.recipe.sections import Recipe


def parallelize(
    model: nn.Module, recipe: Recipe, mesh: Mesh, *, compute_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> None:
    """Prepares a model that is still on meta for its layout.

    Args:
        model: its parameters are replaced by sharded ones where the layout shards.
        recipe: memory, layout and run.compile are read.
        mesh: built from the recipe's layout.
        compute_dtype: that sharded parameters are gathered in.
        reduce_dtype: that sharded gradients are summed in.
    """
    # Checkpointing first: it wraps plain modules, and a block must be compiled together with its recomputation.
    apply_activation_checkpointing(model, recipe.memory)
    if recipe.run.compile:
        for block in layers_of(model):
            block.compile(fullgraph=True)
    # Sharding last: its hooks gather and free parameters, and run outside of the compiled graph.
    if recipe.layout.fsdp > 1:
        sub_mesh = mesh.axes("replica", "shard")
        assert sub_mesh is not None
        shard(model, sub_mesh, zero=recipe.layout.zero, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)


def own_gradients(model: nn.Module, mesh: Mesh) -> Gradients:
    """Chooses what brings the gradients of a parallelized, materialized model to their sum."""
    if mesh.layout.fsdp > 1:
        return Sharded(model, mesh.layout.zero)
    replicas = mesh.axes("replica")
    if replicas is not None:
        return Replicate(model.parameters(), replicas.get_group())
    return Alone(model)
