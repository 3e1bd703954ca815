"""Verifying a commit: every byte of every file, against its file's digest and its tensor's checksum.

The digest finds any change; the checksums say which tensor was hit, and which rank wrote it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from drumline.checkpoint.commit import Commit, examine
from drumline.checkpoint.errors import Damage
from drumline.checkpoint.index import MANIFEST, MARKER
from drumline.checkpoint.reading import Shards, StoredSlab, damage_of, stored_slabs
from drumline.storage import checksum_of

_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Verdict:
    """What verifying found.

    Args:
        path: the folder of the commit.
        num_files: files that were read.
        num_bytes: bytes that were read.
        num_tensors: logical tensors.
        damages: what is wrong; empty where the commit is whole.
        strangers: names in the folder that are no part of the commit; they do no harm.
    """

    path: Path
    num_files: int
    num_bytes: int
    num_tensors: int
    damages: tuple[Damage, ...]
    strangers: tuple[str, ...]


def verify(path: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> Verdict:
    """Reads all of a commit.

    Args:
        path: its folder.
        progress: is told about bytes that were read since the last call.

    Returns:
        What was found; it goes on after the first fault.

    Raises:
        NotACommitError: there is no finished commit there.
        CommitError: a newer drumline wrote it.
    """
    commit, damages = examine(path)
    if commit is None:
        return Verdict(path, 0, 0, 0, tuple(damages), ())
    known = {damage.file for damage in damages}
    num_files = num_bytes = 0
    for file, slabs in sorted(_slabs_by_file(commit).items()):
        if file in known:
            continue
        damages += _verify_shard(path, file, slabs, commit.manifest.files[file].xxh3_128, progress)
        num_files += 1
        num_bytes += commit.manifest.files[file].num_bytes
    expected = {*commit.manifest.files, MANIFEST, MARKER}
    strangers = tuple(sorted(child.name for child in path.iterdir() if child.name not in expected))
    documents = [file for file in expected if file not in _slabs_by_file(commit)]
    return Verdict(path, num_files + len(documents), num_bytes, len(commit.index.tensors), tuple(damages), strangers)


def size_of(path: Path) -> int:
    """Bytes in a folder, to foretell how long verifying it takes."""
    return sum(child.stat().st_size for child in path.glob("*.safetensors"))


def _slabs_by_file(commit: Commit) -> dict[str, list[StoredSlab]]:
    by_file: dict[str, list[StoredSlab]] = defaultdict(list)
    shards = {file for file in commit.manifest.files if file.endswith(".safetensors")}
    for file in shards:
        by_file[file] = []
    for name, tensor in commit.index.tensors.items():
        for piece in tensor.pieces:
            if piece.file in shards:
                by_file[piece.file] += stored_slabs(name, tensor, piece, commit.index.chunk_bytes)
    for slabs in by_file.values():
        slabs.sort(key=lambda slab: slab.start)
    return dict(by_file)


def _verify_shard(
    path: Path, file: str, slabs: list[StoredSlab], expected: str, progress: Callable[[int], None]
) -> list[Damage]:
    """One pass over a shard: the slabs in the order of the file, and what lies between them."""
    damages: list[Damage] = []
    digest = xxhash.xxh3_128()
    rank = slabs[0].piece.rank if slabs else None
    try:
        size = (path / file).stat().st_size
        with Shards(path) as shards:
            for start, end, slab in _stretches(slabs, size):
                block = memoryview(bytearray(end - start))
                shards.read_unverified(file, block, start)
                digest.update(block)
                if slab and checksum_of(block) != slab.checksum:
                    damages.append(damage_of(slab))
                progress(len(block))
    except OSError as error:
        return [*damages, Damage(file, f"it cannot be read: {error.strerror or error}", rank=rank)]
    if digest.hexdigest() != expected and not damages:
        damages.append(Damage(file, "its header was changed (digest); the bytes of its tensors are whole", rank=rank))
    return damages


def _stretches(slabs: list[StoredSlab], size: int) -> Iterator[tuple[int, int, StoredSlab | None]]:
    at = 0
    for slab in slabs:
        yield from _blocks(at, slab.start)
        at = slab.start + slab.slab.num_bytes
        yield slab.start, at, slab
    yield from _blocks(at, size)


def _blocks(start: int, end: int) -> Iterator[tuple[int, int, None]]:
    for at in range(start, end, _BLOCK_BYTES):
        yield at, min(at + _BLOCK_BYTES, end), None
