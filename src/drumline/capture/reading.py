"""A capture on disk, read as logical tensors: whichever layout wrote it, one key gives one whole tensor.

    DIR/capture.json                     what was recorded, of which recipe, in which layout; written last
    DIR/step-00000003/rank-00000.safetensors

Headers are read at once, elements when a tensor is asked for.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.capture.digest import Digest, joined
from drumline.capture.files import RankFile
from drumline.capture.keys import in_order
from drumline.capture.operators import Operator, read_operators
from drumline.capture.parts import Part, join
from drumline.recipe.errors import DrumlineError

MANIFEST, FORMAT = "capture.json", 1


class CaptureError(DrumlineError):
    """A folder is no capture, or one that was not finished."""


@dataclass(frozen=True)
class Manifest:
    """What a capture holds.

    Attributes:
        recipe: resolved, as JSON values.
        layout: as a word, such as `dp2.tp2`.
        level: of `recorder.LEVELS`.
        steps: that were recorded, from 1.
        only: patterns of names; empty: all was recorded.
        num_ranks: that recorded.
        environment: versions and machine of rank 0.
    """

    recipe: Mapping[str, Any]
    layout: str
    level: str
    steps: tuple[int, ...]
    only: tuple[str, ...]
    num_ranks: int
    environment: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Makes a folder with all its ranks' files a capture."""
        text = json.dumps({"format": FORMAT, **vars(self)}, indent=1)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Reads a capture's.

        Args:
            folder: of the capture.

        Returns:
            The manifest.

        Raises:
            CaptureError: there is none, or one of another version.
        """
        path = folder / MANIFEST
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            unfinished = folder.is_dir() and any(folder.glob("step-*"))
            why = "was not finished: capture it again" if unfinished else "is no capture"
            raise CaptureError(f"{folder} {why} (it has no {MANIFEST})") from None
        except (OSError, ValueError) as error:
            raise CaptureError(f"{path} cannot be read: {error}") from error
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise CaptureError(f"{path} is of another version of drumline, which writes format {FORMAT}")
        try:
            return Manifest(**{**found, "steps": tuple(found["steps"]), "only": tuple(found["only"])})
        except (KeyError, TypeError) as error:
            raise CaptureError(f"{path} lacks a field or has one too many: {error}") from error


@dataclass(frozen=True)
class Whole:
    """A logical tensor.

    Attributes:
        tensor: joined from the parts of all ranks.
        is_replicated: ranks that hold the same elements hold the same bits.
        is_complete: every element is held by a rank.
    """

    tensor: torch.Tensor
    is_replicated: bool
    is_complete: bool


@dataclass(frozen=True)
class _Held:
    file: RankFile
    index: int
    rank: int

    @property
    def part(self) -> Part:
        return self.file.parts[self.index]


class Capture:
    """A capture that is read.

    Args:
        folder: that `drumline numerics capture` wrote.

    Raises:
        CaptureError: it is none, or was not finished.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._held: dict[str, list[_Held]] = {}
        for path in sorted(folder.glob("step-*/rank-*.safetensors")):
            file, rank = RankFile(path), int(path.stem.partition("-")[2])
            for index, part in enumerate(file.parts):
                self._held.setdefault(part.key, []).append(_Held(file, index, rank))
        ranks = Counter(path.parent.name for path in folder.glob("step-*/rank-*.safetensors"))
        if len(ranks) != len(self.manifest.steps) or set(ranks.values()) != {self.manifest.num_ranks}:
            steps, each = len(self.manifest.steps), self.manifest.num_ranks
            raise CaptureError(
                f"{folder} lacks files: it should have {each} in each of {steps} folders of steps, "
                f"and has {dict(ranks)}"
            )
        self._rows: dict[int, bytes] = {}

    @property
    def keys(self) -> list[str]:
        """All keys, in the order in which a step computes them."""
        return in_order(self._held)

    def __contains__(self, key: str) -> bool:
        return key in self._held

    @property
    def has_elements(self) -> bool:
        """Whether tensors were kept, not only what digests say of them."""
        return all(held.file.has_elements(held.index) for held in next(iter(self._held.values()), []))

    @property
    def has_operators(self) -> bool:
        """Whether operators were recorded."""
        return any(self.folder.glob("step-*/ops-*.safetensors"))

    def operators(self) -> Iterator[tuple[int, Operator]]:
        """Reads the operators that were recorded.

        Yields:
            The rank and the operator, a rank's of a step in their order.
        """
        for path in sorted(self.folder.glob("step-*/ops-*.safetensors")):
            rank = int(path.stem.partition("-")[2])
            yield from ((rank, each) for each in read_operators(path))

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the logical tensor."""
        return self._held[key][0].part.shape

    def dtype(self, key: str) -> torch.dtype:
        """Of the logical tensor."""
        return self._held[key][0].part.tensor.dtype

    def read(self, key: str) -> Whole:
        """Joins a logical tensor.

        Args:
            key: of it.

        Returns:
            The tensor, and whether its parts fit together.
        """
        found = join([[held.file.part(held.index)] for held in self._held[key]])
        return Whole(found.tensors[key], not found.unequal, not found.missing)

    def digest(self, key: str) -> tuple[Digest | None, bool]:
        """Adds up the digests of a logical tensor's parts.

        Args:
            key: of it.

        Returns:
            The digest, None where parts have none, overlap in part, or leave something out; and whether ranks that
            hold the same part hold the same bits.
        """
        first: dict[tuple, Digest] = {}
        count, is_replicated = 0, True
        for held in self._held[key]:
            part = held.part
            if part.digest is None:
                return None, True
            if not part.tensor.numel():
                continue
            place = self._place(part)
            if place in first:
                is_replicated &= first[place].hash == part.digest.hash
            else:
                first[place] = part.digest
                count += part.tensor.numel()
        size = 1
        for length in self.shape(key):
            size *= length
        return (joined(list(first.values())) if first and count == size else None), is_replicated

    def holder(self, key: str, index: Sequence[int]) -> tuple[int, int]:
        """Who holds an element.

        Args:
            key: of a logical tensor.
            index: of the element.

        Returns:
            The first rank that has it and the micro-batch of the global batch that it was computed in; -1 for none.
        """
        for held in self._held[key]:
            part = held.part
            if part.rows_N is not None:
                if bool((part.rows_N == index[0]).any()):
                    return held.rank, part.microbatch
            elif all(o <= i < o + n for o, i, n in zip(part.offsets, index, part.tensor.shape, strict=True)):
                return held.rank, part.microbatch
        return -1, -1

    def _place(self, part: Part) -> tuple:
        if part.rows_N is None:
            return part.offsets, tuple(part.tensor.shape)
        if id(part.rows_N) not in self._rows:  # rows live as long as their file
            self._rows[id(part.rows_N)] = part.rows_N.numpy().tobytes()
        return part.microbatch, self._rows[id(part.rows_N)]
