"""A snapshot: this rank's share of a step, copied into one buffer that looks like the data section of its shard.

The copy is done before `take` returns, so that an optimizer step right after changes nothing of it.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drumline.checkpoint.boxes import slabs
from drumline.checkpoint.index import StoredPiece, StoredTensor
from drumline.checkpoint.piece import Piece, share
from drumline.recipe.errors import DrumlineError
from drumline.storage import Arena, Stored, checksum_of, dtype_of, name_of, place


@dataclass(frozen=True)
class Entry:
    """A piece and its place in the shard."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    stored: Stored


@dataclass(frozen=True)
class Plan:
    """What a rank writes, and where in its shard.

    Args:
        entries: in the order of the file.
        num_bytes: of the data section.
    """

    entries: tuple[Entry, ...]
    num_bytes: int


@dataclass(frozen=True)
class Snapshot:
    """A rank's share of a step, in host memory.

    Args:
        plan: what lies where.
        memory: the data section of the shard.
    """

    plan: Plan
    memory: memoryview


class Reserving:
    """Makes an arena large enough, behind the caller's back where that takes time.

    Args:
        arena: the buffer.
        num_bytes: that it must hold.
        pin: register it with CUDA.
    """

    def __init__(self, arena: Arena, num_bytes: int, pin: bool):
        self._arena = arena
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._size = num_bytes, pin

    def start(self) -> None:
        """Begins; nothing is to be done where the arena is large enough."""
        if not self._arena.holds(*self._size):
            self._thread = threading.Thread(target=self._reserve, name="reserve-snapshot", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Waits until it is done.

        Raises:
            DrumlineError: there is not that much memory.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            size = f"{self._size[0]:,} bytes"
            raise DrumlineError(f"no memory for the snapshot of a commit, {size}: {self._error}") from self._error

    def _reserve(self) -> None:
        try:
            self._arena.reserve(self._size[0], pin=self._size[1])
        except BaseException as error:
            self._error = error


class Snapshots:
    """Takes snapshots of one rank into one reused buffer; the next one overwrites the last."""

    def __init__(self, rank: int):
        self._rank = rank
        self._arena = Arena()
        self._signature: list[tuple[object, ...]] = []
        self._plan = Plan((), 0)
        self._sources: list[int] = []
        self._reserving = Reserving(self._arena, 0, False)

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """Begins to make room for the snapshot of these pieces, so that the first one is as quick as the others.

        Touching fresh memory takes longer than copying into it; a thread does that, and `take` waits for it.

        Args:
            pieces: as they will be saved.

        Raises:
            DrumlineError: they contradict each other.
        """
        signature: list[tuple[object, ...]] = [
            (p.name, p.global_shape, p.offsets, p.tensor.shape, p.tensor.dtype, p.replicas) for p in pieces
        ]
        if signature != self._signature:
            self._plan, self._sources = plan(pieces, self._rank)
            self._signature = signature
        num_bytes, pin = self._plan.num_bytes, any(piece.tensor.is_cuda for piece in pieces)
        self._reserving.join()
        self._reserving = Reserving(self._arena, num_bytes, pin)
        self._reserving.start()

    def take(self, pieces: Sequence[Piece]) -> Snapshot:
        """Copies this rank's share.

        Args:
            pieces: all pieces of this rank.

        Returns:
            The snapshot; good until the next one is taken.

        Raises:
            DrumlineError: they contradict each other.
        """
        self.prepare(pieces)
        self._reserving.join()
        sources = [pieces[position].tensor for position in self._sources]
        with torch.no_grad():
            for entry, source in zip(self._plan.entries, sources, strict=True):
                target = self._arena.view(entry.stored.start, entry.stored.shape, source.dtype)
                target.copy_(source, non_blocking=True)
        for device in {source.device for source in sources if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return Snapshot(self._plan, self._arena.memory(self._plan.num_bytes))

    def release(self) -> None:
        """Gives the buffer back."""
        self._reserving.join()
        self._arena.release()


def plan(pieces: Sequence[Piece], rank: int) -> tuple[Plan, list[int]]:
    """Decides what a rank writes and where it lies in its shard.

    Args:
        pieces: all pieces of this rank.
        rank: this rank.

    Returns:
        The plan, and for each of its entries the position of its piece in `pieces`.

    Raises:
        DrumlineError: they contradict each other.
    """
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for piece in pieces:
        agreed = shapes.setdefault(piece.name, (piece.global_shape, piece.tensor.dtype))
        if agreed != (piece.global_shape, piece.tensor.dtype):
            raise DrumlineError(
                f"pieces of {piece.name} disagree: {list(agreed[0])} {agreed[1]} and "
                f"{list(piece.global_shape)} {piece.tensor.dtype}"
            )
    positions = {id(piece): position for position, piece in enumerate(pieces)}
    # An empty part says nothing, unless the logical tensor is itself empty.
    mine = [piece for piece in share(pieces, rank) if piece.tensor.numel() or 0 in piece.global_shape]
    counts = Counter(piece.name for piece in mine)
    by_key = {
        piece.name if counts[piece.name] == 1 else f"{piece.name}@{','.join(map(str, piece.offsets))}": piece
        for piece in mine
    }
    placed = place([(key, name_of(piece.tensor.dtype), tuple(piece.tensor.shape)) for key, piece in by_key.items()])
    entries = [
        Entry(by_key[stored.key].name, by_key[stored.key].global_shape, by_key[stored.key].offsets, stored)
        for stored in placed
    ]
    num_bytes = placed[-1].end if placed else 0
    return Plan(tuple(entries), num_bytes), [positions[id(by_key[stored.key])] for stored in placed]


def describe(snapshot: Snapshot, shard: str, rank: int, data_start: int, chunk_bytes: int) -> dict[str, StoredTensor]:
    """The index entries of a snapshot, with checksums.

    Args:
        snapshot: the bytes.
        shard: name of the file they go to.
        rank: who writes it.
        data_start: first byte of the data section in the file.
        chunk_bytes: largest part of a tensor that has a checksum of its own.

    Returns:
        By logical name.
    """
    tensors: dict[str, StoredTensor] = {}
    for entry in snapshot.plan.entries:
        stored = entry.stored
        data = snapshot.memory[stored.start : stored.end]
        cut = slabs(stored.shape, dtype_of(stored.dtype).itemsize, chunk_bytes)
        piece = StoredPiece(
            file=shard,
            rank=rank,
            key=stored.key,
            start=data_start + stored.start,
            end=data_start + stored.end,
            offsets=entry.offsets,
            shape=stored.shape,
            checksums=tuple(checksum_of(data[slab.start : slab.start + slab.num_bytes]) for slab in cut),
        )
        before = tensors.get(entry.name)
        pieces = (*before.pieces, piece) if before else (piece,)
        tensors[entry.name] = StoredTensor(dtype=stored.dtype, shape=entry.global_shape, pieces=pieces)
    return tensors
