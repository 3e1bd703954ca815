"""From a model in its layout to its exact gradients."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from drumline.parallel.exact.collect import Collected
from drumline.parallel.exact.deposits import Deposits, apart
from drumline.parallel.exact.replicated import ExactReplicated
from drumline.parallel.exact.sharded import ExactSharded, GatheredGradients
from drumline.parallel.exact.use import Use, take_grad
from drumline.parallel.gradients import Gradients
from drumline.parallel.mesh import Mesh
from drumline.parallel.place import DATA_AXES, Place, Places
from drumline.recipe.lanes import Lanes

EMBEDDING, SECOND_USE = "embedding.weight", "embedding.weight@output"


def own_exact_gradients(
    model: nn.Module, mesh: Mesh, places: Places, lanes: Lanes, *, apart_from: Collection[nn.Parameter] = ()
) -> Gradients:
    """Chooses what sums the gradients of a parallelized, materialized model, or of one stage, in exact mode.

    Args:
        model: after `parallelize`.
        mesh: of the layout.
        places: that `parallelize` gave.
        lanes: of the run.
        apart_from: parameters that it shares with another stage of this rank; its gradients are added to that one's.

    Returns:
        The gradients.
    """
    data_group, replica_group = mesh.group(*DATA_AXES), mesh.group("dp")
    is_sharded = mesh.layout.fsdp > 1
    gathered = GatheredGradients(model) if is_sharded else None
    deposits, uses = Deposits(), list[Use]()
    for name, param in model.named_parameters():
        if param.requires_grad:
            take = partial(_take, param, gathered)
            counts = _counts(places[name], mesh) and param not in apart_from
            uses.append(Use(param, take, counts, adds=param in apart_from))
    if _uses_embedding_twice(model):
        weight = dict(model.named_parameters())[EMBEDDING]
        _keep_output_apart(model, deposits)
        uses.append(Use(weight, partial(deposits.take, SECOND_USE), counts=False, adds=True))
    collected = Collected(uses, deposits, lanes, mesh.data_rank)
    if not is_sharded:
        return ExactReplicated(collected, data_group)
    assert isinstance(model, FSDPModule)
    assert data_group is not None
    return ExactSharded(model, collected, data_group, replica_group, mesh.layout.fsdp)


def _take(param: nn.Parameter, gathered: GatheredGradients | None, microbatch: int) -> torch.Tensor | None:
    return take_grad(param) if gathered is None else gathered.take(param)


def _counts(place: Place, mesh: Mesh) -> bool:
    """Whether this rank is among those that count a parameter: replicas of whole parameters share the counting out."""
    if mesh.layout.fsdp > 1:
        return place.is_first(mesh)
    others = replace(place, copied=tuple(axis for axis in place.copied if axis not in DATA_AXES))
    return others.is_first(mesh)


def _uses_embedding_twice(model: nn.Module) -> bool:
    part, shape = cast(Any, model.part), cast(Any, model.shape)
    return bool(shape.tie_embeddings and part.has_embedding and part.has_output)


def _keep_output_apart(model: nn.Module, deposits: Deposits) -> None:
    output = cast(Any, model.output)
    cross_entropy = output.cross_entropy
    output.cross_entropy = lambda hidden_ND, weight_VD, labels_N: cross_entropy(
        hidden_ND, apart(weight_VD, SECOND_USE, deposits), labels_N
    )
