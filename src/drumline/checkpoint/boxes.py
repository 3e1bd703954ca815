"""Boxes: the part of a logical tensor that a piece holds, and how two of them meet.

A box is given by its first index and its extent in every dim. All of resharding is here: which parts of the stored
boxes make up a wanted one, whatever cut the tensor. Pure arithmetic.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A part of a tensor.

    Args:
        offsets: first index in each dim.
        shape: extent in each dim; a box with a zero in it is empty.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements in the box."""
        return math.prod(self.shape)

    def meet(self, other: "Box") -> "Box | None":
        """What two boxes of one tensor have in common.

        Args:
            other: a box of the same number of dims.

        Returns:
            The common box; None where it would be empty.
        """
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(extent > 0 for extent in shape) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `outer`.

        Args:
            outer: a box that contains this one.

        Returns:
            One slice a dim.
        """
        return tuple(
            slice(start - base, start - base + extent)
            for start, base, extent in zip(self.offsets, outer.offsets, self.shape, strict=True)
        )

    def shifted(self, by: Sequence[int]) -> "Box":
        """The same box, counted from elsewhere: `by` is added to its offsets."""
        return Box(tuple(start + add for start, add in zip(self.offsets, by, strict=True)), self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offsets, self.shape, strict=True)) + "]"


@dataclass(frozen=True)
class Slab:
    """A box whose elements are neighbours in memory.

    Args:
        box: within the tensor that was cut.
        start: its first byte there.
        num_bytes: its size.
    """

    box: Box
    start: int
    num_bytes: int


def slabs(shape: Sequence[int], itemsize: int, chunk_bytes: int) -> list[Slab]:
    """Cuts a contiguous tensor into contiguous boxes of bounded size: the unit of checksums and of reads.

    Args:
        shape: of the tensor.
        itemsize: bytes of an element.
        chunk_bytes: largest size of a slab; at least `itemsize`.

    Returns:
        The slabs in the order of memory; none where the tensor is empty.
    """
    if math.prod(shape) == 0:
        return []
    # Rows of the first dim whose rows fit are taken several at a time; the dims before it are walked one index at a
    # time.
    row_bytes = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    dim = next((dim for dim, num_bytes in enumerate(row_bytes) if num_bytes <= chunk_bytes), None)
    if dim is None:
        return [Slab(Box((), ()), 0, itemsize)]
    num_rows = chunk_bytes // row_bytes[dim]
    rest = tuple(shape[dim + 1 :])
    cut, start = [], 0
    for lead in itertools.product(*(range(extent) for extent in shape[:dim])):
        for first in range(0, shape[dim], num_rows):
            extent = min(num_rows, shape[dim] - first)
            box = Box((*lead, first, *(0 for _ in rest)), (*(1 for _ in lead), extent, *rest))
            cut.append(Slab(box, start, extent * row_bytes[dim]))
            start += extent * row_bytes[dim]
    return cut


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[str, tuple[int, ...]] | None:
    """Why boxes do not cover a tensor exactly once.

    Args:
        shape: of the tensor.
        boxes: its parts; empty ones are of no consequence.

    Returns:
        None where they do. Else what is wrong, and the positions in `boxes` of those to blame.
    """
    whole = Box((0,) * len(shape), tuple(shape))
    for position, box in enumerate(boxes):
        if len(box.offsets) != len(shape) or len(box.shape) != len(shape):
            return f"{box} has another number of dims than shape {list(shape)}", (position,)
        if any(a < 0 or n < 0 or a + n > extent for a, n, extent in zip(box.offsets, box.shape, shape, strict=True)):
            return f"{box} reaches out of shape {list(shape)}", (position,)
    parts = [(position, box) for position, box in enumerate(boxes) if box.num_elements]
    if clash := _overlap(parts, len(shape)):
        return f"{boxes[clash[0]]} and {boxes[clash[1]]} overlap", clash
    num_covered = sum(box.num_elements for _, box in parts)
    if num_covered != whole.num_elements:
        return f"{whole.num_elements - num_covered:,} of {whole.num_elements:,} elements are in no piece", ()
    return None


def _overlap(parts: list[tuple[int, Box]], num_dims: int) -> tuple[int, int] | None:
    if num_dims == 0:
        return (parts[0][0], parts[1][0]) if len(parts) > 1 else None
    # Sweep along the dim that separates the boxes best; only boxes that are open at the same place are compared.
    dim = max(range(num_dims), key=lambda dim: len({box.offsets[dim] for _, box in parts}))
    active: list[tuple[int, Box]] = []
    for position, box in sorted(parts, key=lambda part: part[1].offsets[dim]):
        active = [(p, b) for p, b in active if b.offsets[dim] + b.shape[dim] > box.offsets[dim]]
        for other, candidate in active:
            if candidate.meet(box):
                return min(other, position), max(other, position)
        active.append((position, box))
    return None
