"""This rank's pieces of the logical tensors of a run: weights and optimizer states, under names that no layout
changes.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from drumline.checkpoint import Piece, whole
from drumline.parallel import Mesh

MODEL = "model."
OPTIMIZER = "optimizer."
MOMENTS = ("exp_avg", "exp_avg_sq")

Parameters = Mapping[str, nn.Parameter]
Buffers = Mapping[str, torch.Tensor]


def parameters_of(model: nn.Module) -> Parameters:
    """Trained parameters by logical name. To be asked once, before the first forward: FSDP2 puts gathered parameters in
    the places of sharded ones while they are in use.
    """
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def model_pieces(parameters: Parameters, mesh: Mesh) -> list[Piece]:
    """This rank's pieces of the weights, named `model.<logical name>`; the tensors are the live ones."""
    return [to_piece(MODEL + name, param.detach(), mesh) for name, param in parameters.items()]


def buffers_of(model: nn.Module) -> Buffers:
    """State that no gradient moves, such as how experts are balanced, by logical name; the same on every rank."""
    return dict(model.named_buffers())


def buffer_pieces(buffers: Buffers, num_ranks: int) -> list[Piece]:
    """The buffers, named `model.<logical name>`, as pieces that all ranks hold; the tensors are the live ones."""
    return [whole(MODEL + name, buffer, tuple(range(num_ranks))) for name, buffer in buffers.items()]


def optimizer_pieces(parameters: Parameters, optimizer: torch.optim.Optimizer, mesh: Mesh) -> list[Piece]:
    """This rank's pieces of AdamW's moments, named `optimizer.<logical name>.<moment>`; the tensors are the live
    ones.
    """
    return [
        to_piece(f"{OPTIMIZER}{name}.{moment}", optimizer.state[param][moment], mesh)
        for name, param in parameters.items()
        for moment in MOMENTS
    ]


def to_piece(name: str, tensor: torch.Tensor, mesh: Mesh) -> Piece:
    """The piece of a logical tensor that `tensor` (plain: all of it; DTensor: its local shard) holds."""
    replicas = mesh.ranks_along(*mesh.replica_axes)
    if not isinstance(tensor, DTensor):
        return Piece(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor, replicas)
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Piece(name, tuple(tensor.shape), tuple(offsets), tensor.to_local(), replicas)
