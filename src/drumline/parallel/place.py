"""Where a rank's part of a parameter lies in the logical tensor, who else holds it, and whose gradients make its own.

A parameter is cut twice: first along the axes that share out the computation (tp, ep, pp), which is what a `Place`
says, and then by FSDP, whose DTensors know their own offsets. Both together give the box that is initialized, written
to a checkpoint and counted in the gradient norm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from drumline.parallel.mesh import Mesh

DATA_AXES = ("dp", "fsdp", "cp")
"""The axes along which ranks see different tokens, and hold the same parameters until FSDP shares them out."""

EXPERT_DATA_AXES = ("dp", "efsdp")
"""The same for experts: along ep, ranks hold other experts, and each rank's experts see the tokens of all of them."""

SUMMED_OVER = (DATA_AXES, (*DATA_AXES, "tp"), EXPERT_DATA_AXES, (*EXPERT_DATA_AXES, "tp"))
"""Every set of axes that a gradient may be partial over."""

_CUT_BY_FSDP = frozenset(("fsdp", "cp", "efsdp"))


@dataclass(frozen=True)
class Place:
    """Where a rank's part of a parameter lies, before FSDP cuts it further.

    Attributes:
        shape: of the logical tensor.
        offsets: where the part starts in it. What the part has beyond the logical tensor's end is padding, zero always.
        copied: the axes along which all ranks hold this very part.
        partial: those of them along which each rank computes a share of the gradient, so that it must be summed.
        stages: the pipeline ranks that hold it too, this one among them; empty: this one alone.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    copied: tuple[str, ...] = DATA_AXES
    partial: tuple[str, ...] = DATA_AXES
    stages: tuple[int, ...] = ()

    def axes_kept(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes along which ranks still hold the same part after FSDP has cut it."""
        return tuple(axis for axis in self.copied if mesh.layout.fsdp == 1 or axis not in _CUT_BY_FSDP)

    def replicas(self, mesh: Mesh) -> tuple[int, ...]:
        """All ranks that hold the same part after FSDP has cut it, this one among them, in order."""
        here = mesh.ranks_along(*self.axes_kept(mesh))
        shifts = [mesh.stage_shift(stage) for stage in self.stages] or [0]
        return tuple(sorted(rank + shift for rank in here for shift in shifts))

    def is_first(self, mesh: Mesh) -> bool:
        """Whether this rank is the one of the replicas that speaks for them, so that each element counts once."""
        return self.replicas(mesh)[0] == mesh.rank


Places = Mapping[str, Place]
"""The place of each parameter that a rank holds, by logical name."""


@dataclass(frozen=True)
class Held:
    """What a rank holds of a logical tensor.

    Attributes:
        tensor: the part without padding, plain; it shares memory with the parameter.
        offsets: where it starts.
        shape: of the logical tensor.
    """

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def whole_places(model: nn.Module) -> dict[str, Place]:
    """The places of parameters that every rank holds whole, as data parallelism has them."""
    return {
        name: Place(tuple(param.shape), (0,) * param.ndim)
        for name, param in model.named_parameters(remove_duplicate=False)
    }


def held(tensor: torch.Tensor, place: Place) -> Held:
    """What a rank holds of a logical tensor.

    Args:
        tensor: a parameter, its gradient or a moment: the rank's part, or FSDP's DTensor over the part.
        place: of the part.

    Returns:
        The part that FSDP left, at its offsets in the logical tensor, without padding.
    """
    local, offsets = to_local(tensor).detach(), place.offsets
    if isinstance(tensor, DTensor):
        _, inner = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        offsets = tuple(a + b for a, b in zip(offsets, inner, strict=True))
    for dim, (offset, size) in enumerate(zip(offsets, place.shape, strict=True)):
        local = local.narrow(dim, 0, max(0, min(local.shape[dim], size - offset)))
    offsets = tuple(min(offset, size) for offset, size in zip(offsets, place.shape, strict=True))
    return Held(local, offsets, place.shape)


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, padding included; the tensor itself where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def holder(places: Places) -> Callable[[str, torch.Tensor], Held]:
    """`held` for a parameter of a name, or for its gradient or moment."""
    return lambda name, tensor: held(tensor, places[name])


@torch.no_grad()
def clear_padding(model: nn.Module, places: Places) -> None:
    """Zeroes what parameters have beyond their logical tensors; nothing moves it from there."""
    for name, param in model.named_parameters():
        part = held(param, places[name])
        local = to_local(param)
        if local.shape != part.tensor.shape:
            kept = part.tensor.clone()
            local.zero_()
            part.tensor.copy_(kept)
