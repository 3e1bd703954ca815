"""A commit on disk: opened, checked for what can be seen without reading the tensors, and read.

Opening checks the marker, the manifest, the digest of every JSON file, the presence and size of every shard, and that
the pieces of each tensor cover it exactly once. Bytes of tensors are checked against their checksums as they are read.
Nothing is unpickled.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.checkpoint.boxes import tiling_problem
from drumline.checkpoint.errors import CommitError, Damage, DamagedCommitError, NotACommitError
from drumline.checkpoint.index import (
    ENVIRONMENT,
    INDEX,
    MANIFEST,
    MARKER,
    RECIPE,
    STATE,
    FileEntry,
    Index,
    Manifest,
    Marker,
    StoredPiece,
    from_bytes,
    num_slabs,
    to_bytes,
)
from drumline.checkpoint.piece import Piece, whole
from drumline.checkpoint.reading import read_into
from drumline.recipe.errors import DrumlineError
from drumline.storage import digest_of, dtype_of

_DOCUMENTS = (INDEX, RECIPE, STATE, ENVIRONMENT)


@dataclass(frozen=True)
class Commit:
    """A commit that was opened and found whole (but for the bytes of its tensors, which are checked as they are read).

    Args:
        path: its folder.
        step: optimizer steps that were done.
        index: logical tensors and where their pieces lie.
        manifest: size and digest of each file.
        state: what was given to `Saver.save` as state.
        recipe: the resolved recipe, as JSON values.
        environment: what it was made on.
    """

    path: Path
    step: int
    index: Index
    manifest: Manifest
    state: dict[str, Any]
    recipe: dict[str, Any]
    environment: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Size of its files."""
        return sum(entry.num_bytes for entry in self.manifest.files.values())

    @property
    def names(self) -> list[str]:
        """The logical names of its tensors, sorted."""
        return sorted(self.index.tensors)

    def has(self, prefix: str) -> bool:
        """Whether it holds a tensor whose name starts so; `has("optimizer.")` is false for imported weights."""
        return any(name.startswith(prefix) for name in self.index.tensors)

    def read_into(self, pieces: Sequence[Piece], *, prefix: str = "", elsewhere: Collection[str] = ()) -> int:
        """Fills pieces with what is stored, whatever layout stored it.

        Args:
            pieces: this rank's pieces; their tensors are overwritten.
            prefix: only tensors whose names start so are wanted; all others in the commit are let be.
            elsewhere: names that only other ranks read, such as those of other pipeline stages.

        Returns:
            Bytes that were read.

        Raises:
            CommitError: a tensor is missing, unexpected, or of another shape or dtype (all are listed, nothing was
                changed); or a checksum does not hold (pieces may then be partly overwritten).
        """
        return read_into(self.path, self.index, pieces, prefix=prefix, elsewhere=elsewhere)

    def tensor(self, name: str) -> torch.Tensor:
        """One logical tensor, put together from all its pieces.

        Args:
            name: its logical name.

        Returns:
            It, in CPU memory.

        Raises:
            CommitError: there is none of this name, or its bytes are damaged.
        """
        if name not in self.index.tensors:
            raise CommitError(f"{self.path} holds no tensor {name}")
        stored = self.index.tensors[name]
        tensor = torch.empty(stored.shape, dtype=dtype_of(stored.dtype))
        read_into(self.path, self.index, [whole(name, tensor)], prefix=name, exact=True)
        return tensor

    def tensors(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """Logical tensors, one at a time.

        Args:
            prefix: which; all by default.

        Yields:
            Logical name and tensor, sorted by name.

        Raises:
            CommitError: bytes are damaged.
        """
        for name in self.names:
            if name.startswith(prefix):
                yield name, self.tensor(name)


def open_commit(path: Path) -> Commit:
    """Opens a commit.

    Args:
        path: its folder.

    Returns:
        The commit.

    Raises:
        NotACommitError: there is no finished commit there.
        DamagedCommitError: a file is missing, cut off or changed; names the file, and for a shard the tensor and the
            rank.
        CommitError: a newer drumline wrote it.
    """
    commit, damages = examine(path)
    if damages or commit is None:
        raise DamagedCommitError(path, damages)
    return commit


def examine(path: Path) -> tuple[Commit | None, list[Damage]]:
    """Looks at a commit without reading its tensors, and goes on after the first fault.

    Args:
        path: its folder.

    Returns:
        The commit, if enough of it could be read, and what is wrong with it.

    Raises:
        NotACommitError: there is no finished commit there.
        CommitError: a newer drumline wrote it.
    """
    marker_data = _read_marker(path)
    try:
        marker = from_bytes(Marker, marker_data, path / MARKER)
        manifest_data = (path / MANIFEST).read_bytes()
        if to_bytes(marker) != marker_data:
            return None, [Damage(MARKER, "its content was changed")]
        if _entry(manifest_data) != marker.manifest:
            return None, [Damage(MANIFEST, f"its size or digest is not what {MARKER} says")]
        manifest = from_bytes(Manifest, manifest_data, path / MANIFEST)
    except DamagedCommitError as error:
        return None, list(error.damages)
    except OSError as error:
        return None, [Damage(MANIFEST, _cannot_read(error))]
    if (manifest.step, manifest.save) != (marker.step, marker.save):
        return None, [Damage(MARKER, f"it is of another save than {MANIFEST}")]
    documents, damages = _read_documents(path, manifest)
    try:
        index = from_bytes(Index, documents.pop(INDEX), path / INDEX)
    except KeyError:
        return None, damages + _shard_damages(path, manifest, {})
    except DamagedCommitError as error:
        return None, damages + list(error.damages)
    by_file: dict[str, list[tuple[str, StoredPiece]]] = defaultdict(list)
    for name, tensor in index.tensors.items():
        for piece in tensor.pieces:
            by_file[piece.file].append((name, piece))
    damages += _index_damages(index, manifest)
    damages += _shard_damages(path, manifest, by_file)
    parsed = {}
    for name in (STATE, RECIPE, ENVIRONMENT):
        try:
            parsed[name] = json.loads(documents.get(name, b"{}"))
        except ValueError:
            damages.append(Damage(name, "it is not JSON"))
            parsed[name] = {}
    return Commit(path, manifest.step, index, manifest, parsed[STATE], parsed[RECIPE], parsed[ENVIRONMENT]), damages


def _read_marker(path: Path) -> bytes:
    if not path.exists():
        raise NotACommitError(f"{path} does not exist")
    if not path.is_dir():
        raise NotACommitError(f"{path} is a file; a commit is a folder, such as RUN/checkpoints/step-00000100")
    try:
        return (path / MARKER).read_bytes()
    except FileNotFoundError:
        raise NotACommitError(
            f"{path} is not a commit of drumline: it has no file {MARKER}, which is written last. It is "
            "foreign, or a save that was never finished"
        ) from None
    except OSError as error:
        raise NotACommitError(f"{path / MARKER} {_cannot_read(error)}") from error


def _read_documents(path: Path, manifest: Manifest) -> tuple[dict[str, bytes], list[Damage]]:
    documents, damages = {}, []
    for name in _DOCUMENTS:
        if name not in manifest.files:
            damages.append(Damage(MANIFEST, f"it does not list {name}"))
            continue
        try:
            data = (path / name).read_bytes()
        except OSError as error:
            damages.append(Damage(name, _cannot_read(error)))
            continue
        if _entry(data) == manifest.files[name]:
            documents[name] = data
        elif len(data) != manifest.files[name].num_bytes:
            damages.append(Damage(name, _wrong_size(len(data), manifest.files[name].num_bytes)))
        else:
            damages.append(Damage(name, "its digest is not what the manifest says: bytes were changed"))
    return documents, damages


def _shard_damages(
    path: Path, manifest: Manifest, by_file: Mapping[str, Sequence[tuple[str, StoredPiece]]]
) -> list[Damage]:
    damages = []
    for file, entry in manifest.files.items():
        if file in _DOCUMENTS:
            continue
        if Path(file).name != file:
            damages.append(Damage(MANIFEST, f"it lists {file!r}, which is no plain name"))
            continue
        held = sorted(by_file.get(file, ()), key=lambda item: item[1].start)
        rank = held[0][1].rank if held else None
        try:
            num_bytes = (path / file).stat().st_size if (path / file).is_file() else None
        except OSError as error:
            damages.append(Damage(file, _cannot_read(error), rank=rank))
            continue
        if num_bytes is None:
            first = held[0][0] if held else None
            damages.append(Damage(file, f"it is missing, and with it {len(held):,} pieces", first, rank))
        elif num_bytes != entry.num_bytes:
            cut = next((name for name, piece in held if piece.end > num_bytes), None)
            damages.append(Damage(file, _wrong_size(num_bytes, entry.num_bytes), cut, rank))
    return damages


def _index_damages(index: Index, manifest: Manifest) -> list[Damage]:
    damages = []
    for name, tensor in index.tensors.items():
        try:
            dtype_of(tensor.dtype)
        except DrumlineError as error:
            damages.append(Damage(INDEX, str(error), name))
            continue
        for piece in tensor.pieces:
            entry = manifest.files.get(piece.file)
            num_bytes = piece.box.num_elements * tensor.itemsize
            if entry is None or piece.file in _DOCUMENTS:
                damages.append(Damage(INDEX, f"it names a shard {piece.file!r} that is not in the manifest", name))
            elif piece.end - piece.start != num_bytes or piece.end > entry.num_bytes:
                damages.append(Damage(INDEX, f"bytes {piece.start}:{piece.end} are not {piece.box}", name, piece.rank))
            elif len(piece.checksums) != num_slabs(tensor, piece, index.chunk_bytes):
                damages.append(Damage(INDEX, "the number of checksums is wrong", name, piece.rank))
        if problem := tiling_problem(tensor.shape, [piece.box for piece in tensor.pieces]):
            damages.append(Damage(INDEX, problem[0], name))
    return damages


def _entry(data: bytes) -> FileEntry:
    return FileEntry(num_bytes=len(data), xxh3_128=digest_of([data]))


def _cannot_read(error: OSError) -> str:
    return "it is missing" if isinstance(error, FileNotFoundError) else f"it cannot be read: {error.strerror or error}"


def _wrong_size(num_bytes: int, expected: int) -> str:
    what = "cut off" if num_bytes < expected else "too long"
    return f"it is {what}: {num_bytes:,} bytes instead of {expected:,}"
