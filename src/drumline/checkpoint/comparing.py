"""Comparing two commits bit for bit, whatever layouts wrote them, in bounded memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from drumline.checkpoint.boxes import Box
from drumline.checkpoint.commit import Commit
from drumline.checkpoint.index import StoredTensor
from drumline.checkpoint.reading import Shards, StoredSlab, stored_slabs
from drumline.storage import bytes_of, dtype_of

_MOST_KEPT = 16


@dataclass(frozen=True)
class Difference:
    """A logical tensor that is not the same in both commits.

    Args:
        name: of the tensor.
        kind: `value`, `dtype`, `shape`, `only in A` or `only in B`.
        num_elements: elements of the tensor, in A where it is there.
        num_different: elements whose bits differ; None where they cannot be compared.
        max_abs: largest absolute difference of values; NaN against a number counts as infinite.
        detail: more about it, in words.
    """

    name: str
    kind: str
    num_elements: int
    num_different: int | None = None
    max_abs: float | None = None
    detail: str = ""


class BoxReader:
    """Reads any box of a commit's tensors, verified; keeps the slabs that the last box needed.

    Args:
        commit: to read from.
        shards: its open shards.
    """

    def __init__(self, commit: Commit, shards: Shards):
        self._commit = commit
        self._shards = shards
        self._name = ""
        self._slabs: list[StoredSlab] = []
        self._kept: dict[int, torch.Tensor] = {}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Reads a box.

        Args:
            name: of the logical tensor.
            box: within it, not empty.

        Returns:
            Its elements.

        Raises:
            DamagedCommitError: a slab that it needs is damaged.
        """
        tensor = self._commit.index.tensors[name]
        if name != self._name:
            self._name, self._kept = name, {}
            self._slabs = [
                slab
                for piece in tensor.pieces
                for slab in stored_slabs(name, tensor, piece, self._commit.index.chunk_bytes)
            ]
        target = torch.empty(box.shape, dtype=dtype_of(tensor.dtype))
        needed: dict[int, torch.Tensor] = {}
        for number, slab in enumerate(self._slabs):
            if common := box.meet(slab.box):
                needed[number] = self._slab(number, slab)
                target[common.within(box)] = needed[number][common.within(slab.box)]
                # Boxes come in order: the next one often needs the same slabs. Of very many, few are kept.
                if len(needed) > _MOST_KEPT:
                    del needed[min(needed)]
        self._kept = needed
        return target

    def _slab(self, number: int, slab: StoredSlab) -> torch.Tensor:
        if number in self._kept:
            return self._kept[number]
        data = torch.empty(slab.slab.num_bytes, dtype=torch.uint8)
        self._shards.read(slab, bytes_of(data))
        return data.view(dtype_of(slab.dtype)).view(slab.slab.box.shape)


def compare(
    one: Commit, other: Commit, *, prefix: str = "", progress: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[Difference]:
    """Compares the tensors of two commits.

    Args:
        one: called A.
        other: called B.
        prefix: only tensors whose names start so.
        progress: is told about bytes of A that were compared since the last call.

    Yields:
        The tensors that differ, by name.

    Raises:
        DamagedCommitError: a tensor cannot be read whole.
    """
    tensors, others = one.index.tensors, other.index.tensors
    with Shards(one.path) as shards, Shards(other.path) as other_shards:
        read, read_other = BoxReader(one, shards).read, BoxReader(other, other_shards).read
        for name in sorted(tensors.keys() | others.keys()):
            if not name.startswith(prefix):
                continue
            a, b = tensors.get(name), others.get(name)
            if a is None or b is None:
                present = a or b
                assert present is not None
                yield Difference(name, "only in B" if a is None else "only in A", present.num_elements)
            elif a.shape != b.shape:
                yield Difference(name, "shape", a.num_elements, detail=f"{list(a.shape)} and {list(b.shape)}")
            elif a.dtype != b.dtype:
                yield Difference(name, "dtype", a.num_elements, detail=f"{a.dtype} and {b.dtype}")
            else:
                difference = _compare_values(name, a, one.index.chunk_bytes, read, read_other, progress)
                if difference:
                    yield difference


def _compare_values(
    name: str,
    tensor: StoredTensor,
    chunk_bytes: int,
    read: Callable[[str, Box], torch.Tensor],
    read_other: Callable[[str, Box], torch.Tensor],
    progress: Callable[[int], None],
) -> Difference | None:
    num_different, max_abs = 0, 0.0
    for piece in tensor.pieces:
        for slab in stored_slabs(name, tensor, piece, chunk_bytes):
            a, b = read(name, slab.box), read_other(name, slab.box)
            different = _bits_differ(a, b)
            if count := int(different.sum()):
                num_different += count
                max_abs = max(max_abs, _max_abs(a.reshape(-1)[different], b.reshape(-1)[different]))
            progress(slab.slab.num_bytes)
    return Difference(name, "value", tensor.num_elements, num_different, max_abs) if num_different else None


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether each element differs in any bit; 0.0 and -0.0 do, a NaN and the same NaN do not."""
    itemsize = a.element_size()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    return a.reshape(-1).view(bits) != b.reshape(-1).view(bits)


def _max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    distance = (a.double() - b.double()).abs()
    # inf - inf of two infinities of one sign cannot come up: their bits are equal.
    return float(distance.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
