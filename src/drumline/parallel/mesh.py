"""The mesh: the ranks of the world arranged along the layout's axes, outermost first."""

import itertools
import math
import operator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from drumline.comm import longest_wait
from drumline.recipe.layout import MESH_AXES, Layout

EXPERT_AXES = ("pp", "dp", "efsdp", "ep", "tp")
"""The same ranks as the experts see them: fsdp x cp, counted through, is cut into efsdp x ep."""


@dataclass(frozen=True)
class Mesh:
    """The axes of a layout, and this rank's coordinates on all of them.

    Attributes:
        layout: the degrees.
        device_mesh: the axes of more than one rank as torch has them; what holds the same weights is one axis there,
            `replica`, and what shares them out another, `shard`. None for one rank.
        expert_mesh: the ranks that hold the same experts, as FSDP wants them: `replica`, where there are any, and
            `shard`. None where experts are not sharded, or as all else is.
        rank: of this process.
    """

    layout: Layout
    device_mesh: DeviceMesh | None
    rank: int
    expert_mesh: DeviceMesh | None = None
    _groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same weights, whatever they compute with them."""
        return ("dp",) if self.layout.fsdp > 1 else ("dp", "cp")

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes along which ranks share weights out: those that share a sequence take part where fsdp does."""
        return ("fsdp", "cp") if self.layout.fsdp > 1 else ()

    def degree(self, axis: str) -> int:
        """Ranks along an axis of `MESH_AXES` or `EXPERT_AXES`."""
        return self.layout.fsdp * self.layout.cp // self.layout.ep if axis == "efsdp" else getattr(self.layout, axis)

    def coordinate(self, axis: str) -> int:
        """This rank's index along an axis (0 along an axis of degree 1)."""
        view = _view_with(axis)
        return self.rank // self._stride(axis, view) % self.degree(axis)

    def _stride(self, axis: str, view: tuple[str, ...]) -> int:
        return math.prod(self.degree(inner) for inner in view[view.index(axis) + 1 :])

    @property
    def data_rank(self) -> int:
        """Which slice of the global batch this rank reads, in [0, layout.data_degree)."""
        return self.coordinate("dp") * self.layout.fsdp + self.coordinate("fsdp")

    def is_first_along(self, *axes: str) -> bool:
        """Whether this rank is the first along all of the named axes."""
        return all(self.coordinate(axis) == 0 for axis in axes)

    def stage_shift(self, stage: int) -> int:
        """What to add to this rank to get the rank at the same place of another pipeline stage."""
        return (stage - self.coordinate("pp")) * self._stride("pp", MESH_AXES)

    def ranks_along(self, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from this one along the named axes only, itself among them, in order.

        Args:
            *axes: of `MESH_AXES`, or of `EXPERT_AXES`, not of both where they differ.

        Returns:
            The ranks.

        Raises:
            KeyError: no view of the ranks has all these axes.
        """
        view = _view_with(*axes)
        strides = [self._stride(axis, view) for axis in axes]
        first = self.rank - sum(stride * self.coordinate(axis) for axis, stride in zip(axes, strides, strict=True))
        places = itertools.product(*(range(self.degree(axis)) for axis in axes))
        return tuple(sorted(first + sum(map(operator.mul, place, strides)) for place in places))

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The process group of `ranks_along` these axes; None where that is this rank alone.

        It is made where it is asked for first: by all ranks of the world, in the same order.
        """
        ranks = self.ranks_along(*axes)
        if len(ranks) == 1:
            return None
        if ranks not in self._groups:
            self._groups[ranks] = own_group(self.lines(*axes))
        return self._groups[ranks]

    def lines(self, *axes: str) -> list[tuple[int, ...]]:
        """`ranks_along` of every rank of the world, each once, in order."""
        at = (Mesh(self.layout, None, rank) for rank in range(self.layout.num_ranks))
        return sorted({mesh.ranks_along(*axes) for mesh in at})

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
    return Mesh(layout, _device_mesh(device, degrees), rank, _expert_mesh(bare, device))


def _expert_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh | None:
    if mesh.layout.ep == 1 or mesh.layout.fsdp == 1:
        return None
    names = {"dp": "replica", "efsdp": "shard"}
    # FSDP shards over one axis at least, if of one rank.
    axes = [axis for axis in EXPERT_AXES if mesh.degree(axis) > 1 or axis == "efsdp"]
    whole = _device_mesh(device, {names.get(axis, axis): mesh.degree(axis) for axis in axes})
    return whole["replica", "shard"] if "dp" in axes else whole["shard"]


def _device_mesh(device: torch.device, degrees: dict[str, int]) -> DeviceMesh:
    # `init_device_mesh` would give its groups torch's own timeout, half an hour, instead of the run's.
    mesh = torch.arange(math.prod(degrees.values())).view(*degrees.values())
    groups = [_one_of(mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim]).tolist()) for dim in range(mesh.dim())]
    names = tuple(degrees)
    if mesh.dim() == 1:
        return DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device.type, mesh=mesh, mesh_dim_names=names)


def own_group(members: list[tuple[int, ...]]) -> dist.ProcessGroup | None:
    """Makes the groups that a list divides the world into; every rank of the world must call it with the same list.

    Args:
        members: ranks of each group; together all ranks, each once.

    Returns:
        This rank's group; None where groups are of one rank.
    """
    return _one_of([list(ranks) for ranks in members]) if len(members[0]) > 1 else None


def _one_of(members: list[list[int]]) -> dist.ProcessGroup:
    # Left to torch, a group waits half an hour for a peer that hangs, however long the world is to wait.
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=longest_wait())
    assert isinstance(group, dist.ProcessGroup), "every rank of the world is in one group"
    return group


def _view_with(*axes: str) -> tuple[str, ...]:
    for view in (MESH_AXES, EXPERT_AXES):
        if all(axis in view for axis in axes):
            return view
    raise KeyError(axes)
