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
from drumline.parallel.exact.experts import ExactExperts
from drumline.parallel.exact.replicated import ExactReplicated
from drumline.parallel.exact.senders import FromSenders
from drumline.parallel.exact.sharded import ExactSharded, GatheredGradients
from drumline.parallel.exact.use import Use, take_grad
from drumline.parallel.gradients import Gradients, Several
from drumline.parallel.mesh import Mesh
from drumline.parallel.place import Place, Places
from drumline.recipe.lanes import Lanes

DATA, EXPERT_DATA = ("dp", "fsdp"), ("dp", "efsdp")
"""The axes along which ranks see different data: operators have summed over those that share a sequence."""

EMBEDDING, SECOND_USE = "embedding.weight", "embedding.weight@output"


def make_exact_groups(mesh: Mesh) -> None:
    """Makes the groups that gradients are summed over. All ranks of the world must call it."""
    for axes in (DATA, ("dp",), EXPERT_DATA):
        mesh.group(*axes)


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
    gathered = GatheredGradients(model) if mesh.layout.fsdp > 1 else None
    deposits, uses, of_experts = Deposits(), list[Use](), list[Use]()
    num_senders = mesh.layout.ep // mesh.layout.cp
    per_sender = len(lanes.owned_by(0)) * lanes.num_microbatches
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        counts = _counts(places[name], mesh) and param not in apart_from
        is_of_experts = "efsdp" in places[name].partial
        take = partial(_take, param, gathered)
        if is_of_experts and num_senders > 1:
            take = partial(_take_of_sender, deposits, name, per_sender)
        (of_experts if is_of_experts else uses).append(Use(param, take, counts, adds=param in apart_from))
    if _uses_embedding_twice(model):
        weight = dict(model.named_parameters())[EMBEDDING]
        _keep_output_apart(model, deposits)
        uses.append(Use(weight, partial(deposits.take, SECOND_USE), counts=False, adds=True))
    ways = [_way(model, mesh, Collected(uses, deposits, lanes, mesh.data_rank), DATA)]
    if of_experts:
        fewer = replace(lanes, data_degree=mesh.layout.dp * mesh.degree("efsdp"))
        rank = mesh.coordinate("dp") * mesh.degree("efsdp") + mesh.coordinate("efsdp")
        if num_senders == 1:
            fewer, rank = lanes, mesh.data_rank
        way = _way(model, mesh, Collected(of_experts, deposits, fewer, rank), EXPERT_DATA)
        if num_senders > 1:
            _put_down_apart(model, deposits, first_rank=rank * num_senders)
            way = FromSenders(way, num_senders, per_sender)
        ways.append(way)
    return ways[0] if len(ways) == 1 else Several(ways)


def _way(model: nn.Module, mesh: Mesh, collected: Collected, data_axes: tuple[str, ...]) -> Gradients:
    """What sums gradients over the ranks with different data."""
    data_group, replica_group = mesh.group(*data_axes), mesh.group("dp")
    if mesh.layout.fsdp == 1:
        return ExactReplicated(collected, data_group)
    assert isinstance(model, FSDPModule)
    if data_axes == EXPERT_DATA:
        return ExactSharded(model, collected, data_group, replica_group, range(mesh.degree("efsdp")))
    cp, place = mesh.layout.cp, mesh.coordinate("cp")
    shards = range(place, mesh.layout.fsdp * cp, cp)
    return ExactSharded(model, collected, data_group, replica_group, shards, num_shards=mesh.layout.fsdp * cp)


def _take_of_sender(deposits: Deposits, name: str, per_sender: int, number: int) -> torch.Tensor | None:
    """The gradient of a micro-batch, counted through all senders."""
    sender, microbatch = divmod(number, per_sender)
    return deposits.take(f"{name}@{sender}", microbatch)


def _put_down_apart(model: nn.Module, deposits: Deposits, first_rank: int) -> None:
    """Lets experts put gradients down by whose data they are of."""
    for prefix, module in model.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, ExactExperts):
            forward.put_down = partial(_put_down, deposits, prefix, first_rank)


def _put_down(deposits: Deposits, prefix: str, first_rank: int, data_rank: int, name: str, grad: torch.Tensor) -> None:
    deposits.put(f"{prefix}.{name}.weight@{data_rank - first_rank}", grad)


def _take(param: nn.Parameter, gathered: GatheredGradients | None, microbatch: int) -> torch.Tensor | None:
    return take_grad(param) if gathered is None else gathered.take(param)


def _counts(place: Place, mesh: Mesh) -> bool:
    """Whether this rank is among those that count a parameter: replicas of whole parameters share the counting out."""
    if mesh.layout.fsdp > 1:
        return place.is_first(mesh)
    others = replace(place, copied=tuple(axis for axis in place.copied if axis not in (*DATA, *EXPERT_DATA)))
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
