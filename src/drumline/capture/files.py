"""A rank's file of a step: safetensors, whose header says of every part what it is and where it lies.

    0, 1, ...      the parts, where their elements are kept
    rows0, ...     the rows of the parts that are no boxes, each list once
    hashes         int64 [P], the bits of the hashes, where there are any
    statistics     float64 [P, 8]

It is read part by part, by plain reads: a mapped file would fill the memory of whoever compares large captures.
Source of the format: https://huggingface.co/docs/safetensors.
"""

import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from drumline.capture.digest import Digest, Statistics
from drumline.capture.parts import Part
from drumline.recipe.errors import DrumlineError
from drumline.storage import dtype_of

HASHES, STATISTICS = "hashes", "statistics"
_SIGN, _WORD = 1 << 63, 1 << 64
_MAX_HEADER_BYTES = 1 << 30


class DamagedCaptureError(DrumlineError):
    """A file of a capture is cut off or is no safetensors."""


def write(parts: Sequence[Part], path: Path) -> None:
    """Writes a rank's parts into a new file."""
    tensors: dict[str, torch.Tensor] = {}
    rows_at: dict[int, str] = {}
    listed = []
    for index, part in enumerate(parts):
        entry: dict[str, Any] = {"key": part.key, "shape": part.shape, "offsets": part.offsets}
        if part.microbatch >= 0:
            entry["microbatch"] = part.microbatch
        if part.rows_N is not None:
            name = rows_at.setdefault(id(part.rows_N), f"rows{len(rows_at)}")
            tensors[name], entry["rows"] = part.rows_N, name
        if part.tensor.device.type == "meta":
            entry |= {"size": tuple(part.tensor.shape), "dtype": str(part.tensor.dtype).removeprefix("torch.")}
        else:
            tensors[str(index)] = part.tensor.contiguous()
        listed.append(entry)
    if parts and all(part.digest is not None for part in parts):
        digests = [part.digest for part in parts if part.digest is not None]
        tensors[HASHES] = torch.tensor([d.hash - _WORD if d.hash >= _SIGN else d.hash for d in digests])
        found = [astuple(d.statistics) for d in digests if d.statistics is not None]
        if len(found) == len(digests):
            tensors[STATISTICS] = torch.tensor(found, dtype=torch.float64)
    save_file(tensors, path, metadata={"parts": json.dumps(listed)})


def read(path: Path) -> list[Part]:
    """Reads all that `write` wrote."""
    file = RankFile(path)
    return [file.part(index) for index in range(len(file.parts))]


class RankFile:
    """A file that is read part by part.

    Args:
        path: of the file.

    Attributes:
        parts: all parts in the order in which they were recorded, their tensors on meta.

    Raises:
        DamagedCaptureError: it is no such file, or is cut off.
    """

    def __init__(self, path: Path):
        self._path = path
        try:
            self._header, self._begin = _read_header(path)
            listed = json.loads(self._header["__metadata__"]["parts"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedCaptureError(f"{path} is no file of a capture, or is cut off: {error}") from error
        hashes = self._tensor(HASHES).tolist() if HASHES in self._header else None
        rows = {name: self._tensor(name) for name in self._header if name.startswith("rows")}
        found = self._tensor(STATISTICS).tolist() if STATISTICS in self._header else None
        self.parts: list[Part] = []
        for index, entry in enumerate(listed):
            digest = None
            if hashes is not None:
                digest = Digest(hashes[index] % _WORD, None if found is None else Statistics(*found[index]))
            self.parts.append(
                Part(
                    entry["key"],
                    tuple(entry["shape"]),
                    self._empty(str(index), entry),
                    tuple(entry["offsets"]),
                    rows[entry["rows"]] if "rows" in entry else None,
                    entry.get("microbatch", -1),
                    digest,
                )
            )

    def part(self, index: int) -> Part:
        """A part with its elements, where they are kept."""
        part = self.parts[index]
        if str(index) not in self._header:
            return part
        tensor = self._tensor(str(index))
        return Part(part.key, part.shape, tensor, part.offsets, part.rows_N, part.microbatch, part.digest)

    def has_elements(self, index: int) -> bool:
        """Whether the elements of a part are kept."""
        return str(index) in self._header

    def _empty(self, name: str, entry: dict[str, Any]) -> torch.Tensor:
        if name in self._header:
            size, dtype = self._header[name]["shape"], dtype_of(self._header[name]["dtype"])
        else:
            size, dtype = entry["size"], getattr(torch, entry["dtype"])
        return torch.empty(size, dtype=dtype, device="meta")

    def _tensor(self, name: str) -> torch.Tensor:
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        raw = torch.empty(end - begin, dtype=torch.uint8)
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._begin + begin)
            view, at = memoryview(raw.numpy()), 0  # pyright: ignore[reportArgumentType]
            while at < len(view):
                count = file.readinto(view[at:])
                if not count:
                    raise DamagedCaptureError(f"{self._path} is cut off: {name} ends at byte {self._begin + end:,}")
                at += count
        return raw.view(dtype_of(entry["dtype"])).view(entry["shape"])


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length:,} bytes")
        return json.loads(file.read(length)), 8 + length
