"""What lies where in a commit: the index, the manifest and the marker, as they stand in their JSON files.

step-00000010/
  shard-00000-of-00002.safetensors   one a rank; a valid safetensors file
  index.json         logical tensor -> pieces: file, bytes, place in the logical tensor, checksums
  recipe.json        the resolved recipe
  state.json         data position, schedule, whatever the run wants back
  environment.json   what it ran on
  manifest.json      size and digest of each file above
  COMMITTED          digest of the manifest; written last. A folder without it is no commit.
"""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drumline.checkpoint.boxes import Box, slabs
from drumline.checkpoint.errors import CommitError, Damage, DamagedCommitError
from drumline.storage import dtype_of

INDEX, RECIPE, STATE, ENVIRONMENT, MANIFEST, MARKER = (
    "index.json",
    "recipe.json",
    "state.json",
    "environment.json",
    "manifest.json",
    "COMMITTED",
)
VERSION = 1
CHUNK_BYTES = 16 << 20

Kind = TypeVar("Kind", bound="Record")
Natural = Annotated[int, Field(ge=0)]

_STEP = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.(tmp|old|trash)-step-(\d{8,})-[\w.-]+")


class Record(BaseModel):
    """Base of what stands in the JSON files: frozen, strict, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StoredPiece(Record):
    """A piece in a shard.

    Args:
        file: name of the shard.
        rank: which rank wrote it.
        key: the tensor's name in the shard.
        start: its first byte in the file.
        end: the byte after its last.
        offsets: its place in the logical tensor.
        shape: its extent.
        checksums: xxh3_64 of each slab, in order (see `boxes.slabs`).
    """

    file: str
    rank: Natural
    key: str
    start: Natural
    end: Natural
    offsets: tuple[Natural, ...]
    shape: tuple[Natural, ...]
    checksums: tuple[str, ...]

    @cached_property
    def box(self) -> Box:
        """The part of the logical tensor."""
        return Box(self.offsets, self.shape)


class StoredTensor(Record):
    """A logical tensor in a commit.

    Args:
        dtype: as safetensors names it.
        shape: global shape.
        pieces: that cover it exactly once.
    """

    dtype: str
    shape: tuple[Natural, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.dtype).itemsize

    @property
    def num_elements(self) -> int:
        """Elements of the logical tensor."""
        return Box((), self.shape).num_elements

    @property
    def num_bytes(self) -> int:
        """Bytes of the logical tensor."""
        return self.num_elements * self.itemsize


class Index(Record):
    """All logical tensors of a commit.

    Args:
        format: says what this is.
        version: of the format.
        chunk_bytes: largest slab that has a checksum of its own.
        world_size: ranks that wrote.
        tensors: by logical name.
    """

    format: Literal["drumline-index"] = "drumline-index"
    version: Literal[1] = VERSION
    chunk_bytes: Annotated[int, Field(ge=16)] = CHUNK_BYTES
    world_size: Annotated[int, Field(ge=1)]
    tensors: dict[str, StoredTensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of all logical tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


class FileEntry(Record):
    """A file of a commit.

    Args:
        num_bytes: its size.
        xxh3_128: its digest, hex.
    """

    num_bytes: Natural
    xxh3_128: str


class Manifest(Record):
    """All files of a commit but itself and the marker.

    Args:
        format: says what this is.
        version: of the format.
        step: optimizer steps that were done.
        save: identifies the save that wrote it.
        created: when, seconds since 1970.
        files: by name.
    """

    format: Literal["drumline-manifest"] = "drumline-manifest"
    version: Literal[1] = VERSION
    step: Natural
    save: str
    created: float
    files: dict[str, FileEntry]


class Marker(Record):
    """The last file of a commit.

    Args:
        format: says what this is.
        version: of the format.
        step: as in the manifest.
        save: identifies the save that wrote it.
        manifest: the manifest's size and digest.
    """

    format: Literal["drumline-commit"] = "drumline-commit"
    version: Literal[1] = VERSION
    step: Natural
    save: str
    manifest: FileEntry


class Part(Record):
    """What a rank wrote, as it tells rank 0.

    Args:
        rank: who.
        world_size: of how many.
        shard: name of its file; None where it had nothing to write.
        entry: size and digest of that file.
        tensors: dtype, global shape and its own pieces of each logical tensor.
    """

    rank: Natural
    world_size: Annotated[int, Field(ge=1)]
    shard: str | None
    entry: FileEntry | None
    tensors: dict[str, StoredTensor]


def to_bytes(record: Record) -> bytes:
    """A record as it stands in its file."""
    return record.model_dump_json().encode() + b"\n"


def from_bytes(kind: type[Kind], data: bytes, where: Path) -> Kind:
    """Reads a record.

    Args:
        kind: its class.
        data: content of the file.
        where: the file, for the message.

    Returns:
        The record.

    Raises:
        DamagedCommitError: it is not one.
        CommitError: a newer drumline wrote it.
    """
    try:
        found = json.loads(data)
        if isinstance(found, dict) and isinstance(found.get("version"), int) and found["version"] > VERSION:
            raise CommitError(
                f"{where} is of format version {found['version']}; this drumline reads up to {VERSION}: use a newer one"
            )
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        reason = f"{key or 'content'}: {first['msg']}"
        raise DamagedCommitError(where.parent, [Damage(where.name, reason)]) from error
    except ValueError as error:
        raise DamagedCommitError(where.parent, [Damage(where.name, "it is not JSON")]) from error


def step_name(step: int) -> str:
    """The name of a commit's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in the name of a commit's folder; None where it is not one."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def unfinished_of(name: str) -> tuple[str, int] | None:
    """What a folder is that a save left behind: (`tmp`, `old` or `trash`; the step). None where it is not one."""
    match = _UNFINISHED.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def shard_name(rank: int, world_size: int) -> str:
    """The name of a rank's shard."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def num_slabs(tensor: StoredTensor, piece: StoredPiece, chunk_bytes: int) -> int:
    """Checksums that a piece must have."""
    return len(slabs(piece.shape, tensor.itemsize, chunk_bytes))
