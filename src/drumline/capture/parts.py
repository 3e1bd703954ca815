"""Parts of logical tensors as ranks hold them, and how they are joined again.

Joined, parts must agree bit for bit where they overlap and leave nothing out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from drumline.capture.digest import Digest


@dataclass(frozen=True)
class Part:
    """A part of a logical tensor.

    Attributes:
        key: of the tensor.
        shape: of the whole tensor.
        tensor: the part; on meta where only its digest is kept.
        offsets: where it starts, for a box.
        rows_N: which rows of the first dim it has, int64, where it is no box; then its other dims are whole.
        microbatch: of the global batch, where it was computed in one; -1: of none.
        digest: of the part; None: it was not asked for.
    """

    key: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    offsets: tuple[int, ...] = ()
    rows_N: torch.Tensor | None = None
    microbatch: int = -1
    digest: Digest | None = None

    @property
    def place(self) -> tuple:
        """An index into the whole tensor that gives the part."""
        if self.rows_N is not None:
            return (self.rows_N,)
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.tensor.shape, strict=True))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.rows_N is None and tuple(self.tensor.shape) == self.shape


def scalar(name: str, value: float) -> Part:
    """A number that every rank has."""
    return Part(name, (), torch.tensor(value, dtype=torch.float64))


@dataclass(frozen=True)
class Joined:
    """Whole tensors.

    Attributes:
        tensors: by key.
        unequal: keys of tensors of which two ranks hold the same elements with other bits, in the order in which the
            first rank has them.
        missing: keys of tensors of which no rank holds some elements.
    """

    tensors: Mapping[str, torch.Tensor]
    unequal: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def join(ranks: Iterable[Sequence[Part]]) -> Joined:
    """Joins the parts of all ranks.

    Args:
        ranks: each rank's parts.

    Returns:
        The tensors, and what does not fit together.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor | None] = {}  # None: every element
    unequal: dict[str, None] = {}
    for parts in ranks:
        for part in parts:
            if part.key not in tensors:
                if part.is_whole:
                    tensors[part.key], seen[part.key] = part.tensor, None
                    continue
                tensors[part.key] = torch.zeros(part.shape, dtype=part.tensor.dtype)
                seen[part.key] = torch.zeros(part.shape, dtype=torch.bool)
            whole, is_seen, place = tensors[part.key], seen[part.key], part.place
            if is_seen is None:
                if not same_bits(whole[place], part.tensor):
                    unequal[part.key] = None
                continue
            both = is_seen[place]
            if both.any():
                if not same_bits(whole[place][both], part.tensor[both]):
                    unequal[part.key] = None
                whole[place] = torch.where(both, whole[place], part.tensor)
            else:
                whole[place] = part.tensor
            is_seen[place] = True
    missing = tuple(name for name, is_seen in seen.items() if is_seen is not None and not bool(is_seen.all()))
    return Joined(tensors, tuple(unequal), missing)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; zeros of both signs differ, equal not-a-numbers do not."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(bits_of(a), bits_of(b))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor's elements as integers of their size; contiguous."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])
