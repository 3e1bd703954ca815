"""This rank's pieces of the logical tensors of a run: weights and optimizer states, under names that no layout
changes.
"""

from collections.abc import Mapping

import torch
from torch import nn

from drumline.checkpoint import Piece, whole
from drumline.parallel import Mesh, Place, Places, held
from drumline.recipe.layout import MESH_AXES

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


def model_pieces(parameters: Parameters, places: Places, mesh: Mesh) -> list[Piece]:
    """This rank's pieces of the weights, named `model.<logical name>`; the tensors are the live ones."""
    return [to_piece(MODEL + name, param, places[name], mesh) for name, param in parameters.items()]


def buffers_of(model: nn.Module) -> Buffers:
    """State that no gradient moves, such as how experts are balanced, by logical name; the same on every rank that
    holds the layer.
    """
    return dict(model.named_buffers())


def buffer_pieces(buffers: Buffers, mesh: Mesh) -> list[Piece]:
    """The buffers, named `model.<logical name>`, as pieces that all ranks of a stage hold; the tensors are the live
    ones.
    """
    holders = mesh.ranks_along(*(axis for axis in MESH_AXES if axis != "pp"))
    return [whole(MODEL + name, buffer, holders) for name, buffer in buffers.items()]


def optimizer_pieces(
    parameters: Parameters, places: Places, optimizer: torch.optim.Optimizer, mesh: Mesh
) -> list[Piece]:
    """This rank's pieces of AdamW's moments, named `optimizer.<logical name>.<moment>`; the tensors are the live
    ones.
    """
    return [
        to_piece(f"{OPTIMIZER}{name}.{moment}", optimizer.state[param][moment], places[name], mesh)
        for name, param in parameters.items()
        for moment in MOMENTS
    ]


def to_piece(name: str, tensor: torch.Tensor, place: Place, mesh: Mesh) -> Piece:
    """The piece of a logical tensor that a parameter, its gradient or a moment holds."""
    part = held(tensor, place)
    return Piece(name, part.shape, part.offsets, part.tensor, place.replicas(mesh))
