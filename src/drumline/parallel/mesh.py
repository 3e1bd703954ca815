"""The mesh: the ranks of the world arranged along the layout's axes, outermost first."""

import math
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drumline.recipe.layout import MESH_AXES, Layout


@dataclass(frozen=True)
class Mesh:
    """The axes of a layout that have more than one rank, as a DeviceMesh, and this rank's coordinates on all of
    them.
    """

    layout: Layout
    device_mesh: DeviceMesh | None
    rank: int

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

    def ranks_along(self, axis: str) -> tuple[int, ...]:
        """The ranks that differ from this one along one axis only, itself among them, in order."""
        inner = MESH_AXES[MESH_AXES.index(axis) + 1 :]
        stride = math.prod(getattr(self.layout, name) for name in inner)
        first = self.rank - stride * self.coordinate(axis)
        return tuple(first + stride * index for index in range(getattr(self.layout, axis)))

    def axes(self, *names: str) -> DeviceMesh | None:
        """The sub-mesh over those of the named axes that have more than one rank; None where none has."""
        wanted = tuple(name for name in names if getattr(self.layout, name) > 1)
        return self.device_mesh[wanted] if self.device_mesh is not None and wanted else None


def build_mesh(layout: Layout, device: torch.device, rank: int) -> Mesh:
    """Arranges the ranks of a joined world.

    Args:
        layout: `layout.num_ranks` must be the world's size.
        device: of this rank.
        rank: of this process.

    Returns:
        The mesh.
    """
    axes = [axis for axis in MESH_AXES if getattr(layout, axis) > 1]
    if not axes:
        return Mesh(layout, None, rank)
    degrees = tuple(getattr(layout, axis) for axis in axes)
    return Mesh(layout, init_device_mesh(device.type, degrees, mesh_dim_names=tuple(axes)), rank)
