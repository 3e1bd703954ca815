"""Reading pieces from shards: any boxes out of any others.

Each stored slab that is needed is read once, and its checksum is verified.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from drumline.checkpoint.boxes import Box, Slab, slabs
from drumline.checkpoint.errors import CommitError, Damage, DamagedCommitError
from drumline.checkpoint.index import Index, StoredPiece, StoredTensor
from drumline.checkpoint.piece import Piece
from drumline.storage import bytes_of, checksum_of, dtype_of, name_of, read_range

_NUM_READERS = 2
_MOST_SHOWN = 10


@dataclass(frozen=True)
class StoredSlab:
    """A stored slab: the unit that has a checksum.

    Args:
        name: of the logical tensor.
        dtype: of its elements, as safetensors names it.
        piece: the stored piece that it is part of.
        slab: its place within the piece.
        checksum: xxh3_64, hex.
    """

    name: str
    dtype: str
    piece: StoredPiece
    slab: Slab
    checksum: str

    @property
    def start(self) -> int:
        """Its first byte in the file."""
        return self.piece.start + self.slab.start

    @property
    def box(self) -> Box:
        """Its place in the logical tensor."""
        return self.slab.box.shifted(self.piece.offsets)


def stored_slabs(name: str, tensor: StoredTensor, piece: StoredPiece, chunk_bytes: int) -> list[StoredSlab]:
    """The slabs of a stored piece, in the order of the file.

    Args:
        name: of the logical tensor.
        tensor: that the piece is part of.
        piece: the stored piece.
        chunk_bytes: as in the index.

    Returns:
        The slabs.
    """
    cut = slabs(piece.shape, tensor.itemsize, chunk_bytes)
    return [
        StoredSlab(name, tensor.dtype, piece, slab, checksum)
        for slab, checksum in zip(cut, piece.checksums, strict=True)
    ]


class Shards:
    """The open shards of a commit; a context manager."""

    def __init__(self, path: Path):
        self._path = path
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def read(self, slab: StoredSlab, into: memoryview) -> None:
        """Reads a slab and verifies it.

        Args:
            slab: which.
            into: where its bytes go; exactly its size.

        Raises:
            DamagedCommitError: it cannot be read, or its checksum does not hold.
        """
        try:
            self.read_unverified(slab.piece.file, into, slab.start)
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
            damage = Damage(slab.piece.file, reason, slab.name, slab.piece.rank)
            raise DamagedCommitError(self._path, [damage]) from error
        if checksum_of(into) != slab.checksum:
            raise DamagedCommitError(self._path, [damage_of(slab)])

    def read_unverified(self, file: str, into: memoryview, start: int) -> None:
        """Reads a range of a shard as it is.

        Args:
            file: name of the shard.
            into: where the bytes go.
            start: the first byte in the file.

        Raises:
            OSError: it cannot be read, or ends too early.
        """
        read_range(self._open(file), into, start)

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._files:
                fd = os.open(self._path / file, os.O_RDONLY | os.O_CLOEXEC)
                self._stack.callback(os.close, fd)
                self._files[file] = fd
            return self._files[file]


def damage_of(slab: StoredSlab) -> Damage:
    """What is said of a slab whose checksum does not hold."""
    end = slab.start + slab.slab.num_bytes
    reason = f"bytes {slab.start:,} to {end:,} were changed (checksum)"
    return Damage(slab.piece.file, reason, slab.name, slab.piece.rank)


def read_into(
    path: Path,
    index: Index,
    pieces: Sequence[Piece],
    *,
    prefix: str = "",
    exact: bool = False,
    elsewhere: Collection[str] = (),
) -> int:
    """Fills pieces from the shards of a commit.

    Args:
        path: the folder of the commit.
        index: of the commit.
        pieces: what is wanted; their tensors are overwritten.
        prefix: stored tensors whose names do not start so are let be.
        exact: `prefix` is one whole name.
        elsewhere: names that only other ranks read.

    Returns:
        Bytes that were read.

    Raises:
        CommitError: as `Commit.read_into`.
    """
    wanted: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        wanted[piece.name].append(piece)
    stored = {name for name in index.tensors if (name == prefix if exact else name.startswith(prefix))}
    if problems := _mismatches(index, wanted, stored.difference(elsewhere)):
        shown = "\n".join(f"  {problem}" for problem in problems[:_MOST_SHOWN])
        more = f"\n  and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
        raise CommitError(f"{path} does not hold what is wanted:\n{shown}{more}")
    jobs = sorted(_jobs(index, wanted), key=lambda job: (job[0].piece.file, job[0].start))
    local = threading.local()

    def run(job: tuple[StoredSlab, list[Piece]]) -> int:
        slab, targets = job
        with torch.no_grad():
            if (target := _in_place(slab, targets)) is not None:
                shards.read(slab, bytes_of(target))
                return slab.slab.num_bytes
            if getattr(local, "num_bytes", 0) < slab.slab.num_bytes:
                local.num_bytes = slab.slab.num_bytes
                local.buffer = torch.empty(local.num_bytes, dtype=torch.uint8)
            block = local.buffer[: slab.slab.num_bytes]
            shards.read(slab, bytes_of(block))
            source = block.view(dtype_of(slab.dtype)).view(slab.slab.box.shape)
            for piece in targets:
                common = piece.box.meet(slab.box)
                if common:
                    piece.tensor.detach()[common.within(piece.box)].copy_(source[common.within(slab.box)])
        return slab.slab.num_bytes

    with Shards(path) as shards, ThreadPoolExecutor(_NUM_READERS) as readers:
        reads = [readers.submit(run, job) for job in jobs]
        try:
            return sum(read.result() for read in reads)
        except BaseException:
            for read in reads:
                read.cancel()
            raise


def _mismatches(index: Index, wanted: dict[str, list[Piece]], stored: Iterable[str]) -> list[str]:
    problems = []
    for name, pieces in sorted(wanted.items()):
        if name not in index.tensors:
            problems.append(f"missing: {name} {list(pieces[0].global_shape)}")
            continue
        tensor = index.tensors[name]
        for piece in pieces:
            if piece.global_shape != tensor.shape:
                problems.append(f"shape: {name} is stored as {list(tensor.shape)}, wanted {list(piece.global_shape)}")
                break
            if name_of(piece.tensor.dtype) != tensor.dtype:
                problems.append(f"dtype: {name} is stored as {tensor.dtype}, wanted {name_of(piece.tensor.dtype)}")
                break
    problems += [f"unexpected: {name} {list(index.tensors[name].shape)}" for name in sorted(set(stored) - set(wanted))]
    return problems


def _jobs(index: Index, wanted: dict[str, list[Piece]]) -> Iterable[tuple[StoredSlab, list[Piece]]]:
    for name, pieces in wanted.items():
        tensor = index.tensors[name]
        for stored in tensor.pieces:
            near = [piece for piece in pieces if piece.box.meet(stored.box)]
            if near:
                for slab in stored_slabs(name, tensor, stored, index.chunk_bytes):
                    if targets := [piece for piece in near if piece.box.meet(slab.box)]:
                        yield slab, targets


def _in_place(slab: StoredSlab, targets: list[Piece]) -> torch.Tensor | None:
    # Read straight into the tensor where all of the slab goes to one stretch of host memory.
    if len(targets) != 1 or targets[0].tensor.device.type != "cpu" or targets[0].box.meet(slab.box) != slab.box:
        return None
    region = targets[0].tensor.detach()[slab.box.within(targets[0].box)]
    return region if region.is_contiguous() else None
