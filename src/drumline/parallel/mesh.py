"""The mesh: the ranks of the world arranged along the layout's axes, outermost first."""

import itertools
import math
import operator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drumline.recipe.layout import MESH_AXES, Layout


@dataclass(frozen=True)
class Mesh:
    """The axes of a layout, and this rank's coordinates on all of them.

    Attributes:
        layout: the degrees.
        device_mesh: the axes of more than one rank as torch has them; what holds the same weights is one axis there,
            `replica`, and what shares them out another, `shard`. None for one rank.
        rank: of this process.
    """

    layout: Layout
    device_mesh: DeviceMesh | None
    rank: int

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same weights, whatever they compute with them."""
        return ("dp",) if self.layout.fsdp > 1 else ("dp", "cp")

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes along which ranks share weights out: those that share a sequence take part where fsdp does."""
        return ("fsdp", "cp") if self.layout.fsdp > 1 else ()

    def coordinate(self, axis: str) -> int:
        """This rank's index along an axis (0 along an axis of degree 1)."""
        stride = 1
        for name in reversed(MESH_AXES):
            degree = getattr(self.layout, name)
            if name == axis:
                return self.rank // stride % degree
            stride *= degree
        raise KeyError(axis)

    @property
    def data_rank(self) -> int:
        """Which slice of the global batch this rank reads, in [0, layout.data_degree)."""
        return self.coordinate("dp") * self.layout.fsdp + self.coordinate("fsdp")

    def ranks_along(self, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from this one along the named axes only, itself among them, in order."""
        strides = [
            math.prod(getattr(self.layout, inner) for inner in MESH_AXES[MESH_AXES.index(axis) + 1 :]) for axis in axes
        ]
        first = self.rank - sum(stride * self.coordinate(axis) for axis, stride in zip(axes, strides, strict=True))
        degrees = [range(getattr(self.layout, axis)) for axis in axes]
        places = itertools.product(*degrees)
        return tuple(sorted(first + sum(map(operator.mul, place, strides)) for place in places))

    def axes(self, *names: str) -> DeviceMesh | None:
        """The sub-mesh over those of the named axes of `device_mesh` that have more than one rank; None where none
        has.
        """
        if self.device_mesh is None:
            return None
        wanted = tuple(name for name in names if name in (self.device_mesh.mesh_dim_names or ()))
        return self.device_mesh[wanted] if wanted else None


def build_mesh(layout: Layout, device: torch.device, rank: int) -> Mesh:
    """Arranges the ranks of a joined world.

    Args:
        layout: `layout.num_ranks` must be the world's size.
        device: of this rank.
        rank: of this process.

    Returns:
        The mesh.
    """
    bare = Mesh(layout, None, rank)
    merged = {
        "pp": layout.pp,
        "replica": math.prod(getattr(layout, axis) for axis in bare.replica_axes),
        "shard": math.prod(getattr(layout, axis) for axis in bare.shard_axes),
        "tp": layout.tp,
    }
    degrees = {name: degree for name, degree in merged.items() if degree > 1}
    if not degrees:
        return bare
    return Mesh(layout, init_device_mesh(device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)), rank)
