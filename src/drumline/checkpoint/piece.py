"""A piece: one rank's part of a logical tensor. All that a checkpoint knows of a model.

A logical tensor has a name that no layout changes (`model.layers.0.mlp.up_proj.weight`) and the shape it has on one
device. Which part of it a rank holds is a box.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drumline.checkpoint.boxes import Box
from drumline.recipe.errors import DrumlineError


@dataclass(frozen=True, eq=False)
class Piece:
    """A rank's part of a logical tensor.

    Args:
        name: of the logical tensor.
        global_shape: of the logical tensor.
        offsets: where this part starts in it, one index a dim.
        tensor: the part; plain (no DTensor), any device, any strides. It may be empty.
        replicas: the ranks that hold this very part, this one among them; all of them say the same. It is then written
            once, by one of them. Empty: this rank alone holds it.

    Raises:
        DrumlineError: the part does not lie within the logical tensor.
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    replicas: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in ("global_shape", "offsets", "replicas"):
            object.__setattr__(self, field, tuple(int(value) for value in getattr(self, field)))
        shape = tuple(self.tensor.shape)
        if hasattr(self.tensor, "to_local"):
            raise DrumlineError(f"piece {self.name}: give the local tensor of a DTensor, with its offsets")
        fits = len(shape) == len(self.offsets) == len(self.global_shape) and all(
            min(start, whole - start - extent) >= 0
            for start, extent, whole in zip(self.offsets, shape, self.global_shape, strict=True)
        )
        if not fits:
            raise DrumlineError(
                f"piece {self.name}: a part of shape {list(shape)} at {list(self.offsets)} does not lie within "
                f"the global shape {list(self.global_shape)}"
            )

    @property
    def box(self) -> Box:
        """The part of the logical tensor that is held."""
        return Box(self.offsets, tuple(self.tensor.shape))

    @property
    def num_bytes(self) -> int:
        """Size of the part."""
        return self.tensor.numel() * self.tensor.element_size()


def whole(name: str, tensor: torch.Tensor, replicas: tuple[int, ...] = ()) -> Piece:
    """The piece that is all of a logical tensor.

    Args:
        name: of the logical tensor.
        tensor: all of it.
        replicas: as in `Piece`.

    Returns:
        The piece.
    """
    return Piece(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor, replicas)


def share(pieces: Sequence[Piece], rank: int) -> list[Piece]:
    """The pieces that a rank has to write: its own, and its share of those that it holds together with others.

    Replicas agree without a word: each looks only at the pieces that all of them hold, in an order that does not depend
    on the rank, and gives each, largest first, to the replica that has the fewest bytes so far.

    Args:
        pieces: all pieces of this rank.
        rank: this rank.

    Returns:
        What this rank writes, in the order of `pieces`.

    Raises:
        DrumlineError: a piece names replicas that do not include this rank, or two pieces are the same part.
    """
    groups: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    seen = set()
    for piece in pieces:
        if (piece.name, piece.box) in seen and piece.tensor.numel():
            raise DrumlineError(f"piece {piece.name} {piece.box} is given twice")
        seen.add((piece.name, piece.box))
        group = tuple(sorted(set(piece.replicas))) or (rank,)
        if rank not in group:
            raise DrumlineError(
                f"piece {piece.name}: replicas {list(group)} do not include rank {rank}, which holds it"
            )
        groups[group].append(piece)
    mine = set()
    for group, members in groups.items():
        loads = dict.fromkeys(group, 0)
        for piece in sorted(members, key=lambda piece: (-piece.num_bytes, piece.name, piece.offsets)):
            owner = min(group, key=lambda member: (loads[member], member))
            loads[owner] += piece.num_bytes
            if owner == rank:
                mine.add(id(piece))
    return [piece for piece in pieces if id(piece) in mine]
