"""One save, on one rank: write the shard, say so, and (rank 0) turn all of it into a commit.

Nothing counts until the last rename. Before it, all that was written lies under a temporary name; a failure removes it
again, and a kill leaves it to be removed at the next start.
"""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from drumline.checkpoint import rendezvous
from drumline.checkpoint.boxes import tiling_problem
from drumline.checkpoint.errors import SaveError
from drumline.checkpoint.folder import Folder
from drumline.checkpoint.index import (
    CHUNK_BYTES,
    INDEX,
    MANIFEST,
    MARKER,
    FileEntry,
    Index,
    Manifest,
    Marker,
    Part,
    StoredTensor,
    shard_name,
    to_bytes,
)
from drumline.checkpoint.snapshot import Snapshot, describe
from drumline.recipe.errors import DrumlineError
from drumline.storage import Filesystem, aligned, digest_of, header, write_bytes, write_file


@dataclass(frozen=True)
class Save:
    """One save, as one rank sees it.

    Args:
        folder: the folder of commits.
        step: optimizer steps that were done.
        save: identifies this save; the same on all ranks, never used again.
        rank: this rank.
        world_size: number of ranks.
        keep: commits to keep.
        documents: content of the JSON files, by name (rank 0's count).
        timeout_s: longest wait for other ranks, seconds.
        direct: write around the page cache where possible.
        chunk_bytes: largest part of a tensor that has a checksum of its own.
    """

    folder: Folder
    step: int
    save: str
    rank: int
    world_size: int
    keep: int
    documents: dict[str, bytes]
    timeout_s: float
    direct: bool = True
    chunk_bytes: int = CHUNK_BYTES

    @property
    def filesystem(self) -> Filesystem:
        """What writes."""
        return self.folder.filesystem

    @property
    def unfinished(self) -> Path:
        """The temporary folder."""
        return self.folder.unfinished("tmp", self.step, self.save)

    @property
    def target(self) -> Path:
        """The folder of the commit."""
        return self.folder.commit(self.step)


def carry_out(save: Save, snapshot: Snapshot) -> int:
    """Writes this rank's share, and waits until the commit is made and durable.

    Args:
        save: what to write where.
        snapshot: this rank's share.

    Returns:
        Bytes of the commit's logical tensors on rank 0, which knows them all; 0 on others.

    Raises:
        SaveError: there is no such commit; earlier ones are untouched.
    """
    shard = save.unfinished / shard_name(save.rank, save.world_size)
    doing = f"rank {save.rank} wrote {shard.name}"
    try:
        write_share(save, snapshot)
        deadline = time.monotonic() + save.timeout_s
        if save.rank != 0:
            rendezvous.await_commit(save.unfinished, save.target, save.save, deadline)
            return 0
        doing = "rank 0 waited for the other ranks"
        parts = rendezvous.collect_parts(save.unfinished, save.world_size, deadline)
        doing = "rank 0 made the commit"
        index = index_of(parts, save.chunk_bytes)
        _commit(save, parts, index)
        return index.num_bytes
    except OSError as error:
        reason = f"{error.strerror or error} while {doing}{_free_space(save, snapshot)}"
        raise _give_up(save, shard, reason) from error
    except DrumlineError as error:
        raise _give_up(save, shard, str(error)) from error
    except Exception as error:  # a fault of drumline itself: the other ranks must still hear of it
        _give_up(save, shard, f"rank {save.rank} failed: {error!r}")
        raise


def write_share(save: Save, snapshot: Snapshot) -> None:
    """Writes this rank's share and says so; it waits for nobody.

    Args:
        save: what to write where.
        snapshot: this rank's share.

    Raises:
        OSError: it could not be written.
    """
    save.filesystem.make_folder(save.unfinished)
    shard = save.unfinished / shard_name(save.rank, save.world_size)
    rendezvous.leave_part(save.filesystem, save.unfinished, _write_shard(save, snapshot, shard))


def _write_shard(save: Save, snapshot: Snapshot, shard: Path) -> Part:
    stored = [entry.stored for entry in snapshot.plan.entries]
    if not stored:
        return Part(rank=save.rank, world_size=save.world_size, shard=None, entry=None, tensors={})
    head = aligned(header(stored, {"format": "pt", "step": str(save.step), "rank": str(save.rank)}))
    digest, tensors = write_file(
        save.filesystem,
        shard,
        [head, snapshot.memory],
        direct=save.direct,
        meanwhile=lambda: (
            digest_of([head, snapshot.memory]),
            describe(snapshot, shard.name, save.rank, len(head), save.chunk_bytes),
        ),
    )
    entry = FileEntry(num_bytes=len(head) + len(snapshot.memory), xxh3_128=digest)
    return Part(rank=save.rank, world_size=save.world_size, shard=shard.name, entry=entry, tensors=tensors)


def _commit(save: Save, parts: list[Part], index: Index) -> None:
    filesystem, folder = save.filesystem, save.unfinished
    documents = {INDEX: to_bytes(index), **save.documents}
    files = {part.shard: part.entry for part in parts if part.shard and part.entry}
    for name, data in documents.items():
        write_bytes(filesystem, folder / name, data)
        files[name] = _entry(data)
    manifest = to_bytes(Manifest(step=save.step, save=save.save, created=time.time(), files=files))
    write_bytes(filesystem, folder / MANIFEST, manifest)
    for path in rendezvous.left_by_ranks(folder):
        filesystem.remove(path)
    filesystem.sync_folder(folder)
    write_bytes(
        filesystem, folder / MARKER, to_bytes(Marker(step=save.step, save=save.save, manifest=_entry(manifest)))
    )
    filesystem.sync_folder(folder)
    save.folder.publish(folder, save.step, save.save)
    save.folder.prune(save.keep, save.step, save.save)


def index_of(parts: list[Part], chunk_bytes: int) -> Index:
    """Joins what the ranks wrote.

    Args:
        parts: one of each rank.
        chunk_bytes: largest part of a tensor that has a checksum of its own.

    Returns:
        The index.

    Raises:
        SaveError: the pieces of a tensor do not cover it exactly once, or ranks disagree about it.
    """
    tensors: dict[str, StoredTensor] = {}
    first_rank: dict[str, int] = {}
    for part in parts:
        if part.world_size != len(parts):
            raise SaveError(f"rank {part.rank} saves as one of {part.world_size} ranks, rank 0 as one of {len(parts)}")
        for name, tensor in part.tensors.items():
            before = tensors.get(name)
            if before and (before.dtype, before.shape) != (tensor.dtype, tensor.shape):
                raise SaveError(
                    f"{name} is {before.dtype} {list(before.shape)} on rank {first_rank[name]}, "
                    f"but {tensor.dtype} {list(tensor.shape)} on rank {part.rank}"
                )
            first_rank.setdefault(name, part.rank)
            pieces = (before.pieces if before else ()) + tensor.pieces
            tensors[name] = tensor.model_copy(update={"pieces": pieces})
    for name, tensor in tensors.items():
        if problem := tiling_problem(tensor.shape, [piece.box for piece in tensor.pieces]):
            reason, blamed = problem
            ranks = sorted({tensor.pieces[position].rank for position in blamed})
            holders = f" (ranks {ranks}; if each holds the same part, Piece.replicas must name them)" if blamed else ""
            raise SaveError(f"the pieces of {name} do not make up {list(tensor.shape)}: {reason}{holders}")
    return Index(chunk_bytes=chunk_bytes, world_size=len(parts), tensors=dict(sorted(tensors.items())))


def _entry(data: bytes) -> FileEntry:
    return FileEntry(num_bytes=len(data), xxh3_128=digest_of([data]))


def _free_space(save: Save, snapshot: Snapshot) -> str:
    with contextlib.suppress(OSError):
        free = save.filesystem.free_bytes(save.folder.path)
        return f" ({len(snapshot.memory):,} bytes to write, {free:,} free in {save.folder.path})"
    return ""


def _give_up(save: Save, shard: Path, reason: str) -> SaveError:
    # The shard goes first: on a full disk its space is what the error file is written to.
    with contextlib.suppress(OSError):
        save.filesystem.remove(shard)
    rendezvous.leave_error(save.filesystem, save.unfinished, save.rank, reason)
    if save.world_size == 1:  # nobody else will read the error file
        with contextlib.suppress(OSError):
            save.filesystem.remove_tree(save.unfinished)
    newest = save.folder.newest_step()
    left = f"the newest is {newest}" if newest else "there is none so far"
    return SaveError(f"step {save.step} was not committed: {reason}. Earlier commits are untouched: {left}")
