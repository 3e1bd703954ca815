"""Where tensors lie in a safetensors file, and the file's header.

    8 bytes: length of the header | header: JSON, padded with spaces | data, without holes

The header is padded so that data starts on a block boundary (O_DIRECT can write it), and tensors are ordered by the
size of their elements, so that each is aligned to it without holes, which the format forbids. Source: the safetensors
format, https://huggingface.co/docs/safetensors (format).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drumline.recipe.errors import DrumlineError
from drumline.storage.dtypes import dtype_of

BLOCK_BYTES = 4096
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts


@dataclass(frozen=True)
class Stored:
    """A tensor in a shard.

    Args:
        key: its name in the file.
        dtype: as safetensors names it.
        shape: of the tensor.
        start: its first byte in the data section.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    @property
    def end(self) -> int:
        """The byte after its last one, in the data section."""
        return self.start + self.num_bytes


def place(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[Stored]:
    """Decides where tensors lie.

    Args:
        tensors: (key, dtype as safetensors names it, shape) of each; keys are unique.

    Returns:
        The tensors in the order of the file: largest element first, then as given.
    """
    placed, start = [], 0
    for key, dtype, shape in sorted(tensors, key=lambda tensor: -dtype_of(tensor[1]).itemsize):
        placed.append(Stored(key, dtype, tuple(shape), start))
        start = placed[-1].end
    return placed


def header(placed: Sequence[Stored], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data section.

    Args:
        placed: the tensors, in the order of the file.
        metadata: free text about the file.

    Returns:
        Length and header; a multiple of `BLOCK_BYTES` long.

    Raises:
        DrumlineError: there are more tensors than a safetensors header can name.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for stored in placed:
        span = [stored.start, stored.end]
        entries[stored.key] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(_LENGTH_BYTES + len(text)) // BLOCK_BYTES) * BLOCK_BYTES - _LENGTH_BYTES
    if padded > _MAX_HEADER_BYTES:
        raise DrumlineError(f"{len(placed):,} tensors need a header of {padded:,} bytes; safetensors allows 100 MB")
    return padded.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded)


def read_header(path: Path) -> tuple[list[Stored], int]:
    """Reads the header of a safetensors file.

    Args:
        path: the file.

    Returns:
        Its tensors in the order of the file, and the byte at which the data section starts.

    Raises:
        DrumlineError: it is not a safetensors file, or it is cut off.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise DrumlineError(f"{path} is not a safetensors file, or it is cut off ({size:,} bytes)")
            entries = json.loads(file.read(length))
        placed = [
            Stored(key, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][0])
            for key, entry in entries.items()
            if key != "__metadata__"
        ]
        placed.sort(key=lambda stored: (stored.start, stored.end))
        at = 0
        for stored in placed:
            if stored.start != at or entries[stored.key]["data_offsets"][1] != stored.end:
                raise DrumlineError(f"{path}: the header places tensor {stored.key!r} where it cannot lie")
            at = stored.end
    except OSError as error:
        raise DrumlineError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DrumlineError(f"{path} is not a safetensors file: its header cannot be read") from error
    if _LENGTH_BYTES + length + at != size:
        raise DrumlineError(f"{path} has {size:,} bytes, but its header describes {_LENGTH_BYTES + length + at:,}")
    return placed, _LENGTH_BYTES + length
