"""What takes the parts of logical tensors that a rank has, at the level that is wanted."""

from collections.abc import Sequence

import torch

from drumline.capture.digest import digest, starts_of_box, starts_of_rows
from drumline.capture.keys import is_wanted, split_key
from drumline.capture.parts import Part, scalar

HASH, STATS, TENSORS, OPS = "hash", "stats", "tensors", "ops"
LEVELS = (HASH, STATS, TENSORS, OPS)
WITH_ELEMENTS = frozenset((TENSORS, OPS))


class Parts:
    """A sink that keeps parts.

    Args:
        level: of `LEVELS`.
        only: patterns of names; empty: all.
    """

    def __init__(self, level: str = TENSORS, only: Sequence[str] = ()):
        self.parts: list[Part] = []
        self._level, self._only = level, tuple(only)
        self._starts: dict[tuple, torch.Tensor] = {}
        self._empty: dict[tuple, torch.Tensor] = {}

    def add(
        self,
        key: str,
        shape: tuple[int, ...],
        tensor: torch.Tensor,
        *,
        offsets: tuple[int, ...] = (),
        rows_N: torch.Tensor | None = None,
        microbatch: int = -1,
    ) -> None:
        """Takes a part, which may be overwritten once this returns; as `Part`."""
        if not is_wanted(split_key(key)[2], self._only):
            return
        if self._level in WITH_ELEMENTS:
            self.parts.append(Part(key, shape, tensor.to("cpu", copy=True), offsets, rows_N, microbatch))
            return
        starts_R = self._starts_of(shape, offsets, tuple(tensor.shape), rows_N)
        found = digest(tensor, starts_R, with_statistics=self._level == STATS)
        like = tensor.shape, tensor.dtype
        if like not in self._empty:
            self._empty[like] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self.parts.append(Part(key, shape, self._empty[like], offsets, rows_N, microbatch, found))

    def take(self) -> list[Part]:
        """Gives what was kept, and keeps it no longer."""
        parts, self.parts = self.parts, []
        return parts

    def add_scalar(self, name: str, value: float) -> None:
        """Keeps a number that every rank has."""
        part = scalar(name, value)
        self.add(name, (), part.tensor)

    def _starts_of(
        self, shape: tuple[int, ...], offsets: tuple[int, ...], size: tuple[int, ...], rows_N: torch.Tensor | None
    ) -> torch.Tensor:
        asked = (shape, offsets, size) if rows_N is None else (id(rows_N), shape[1])
        if asked not in self._starts:  # rows live as long as the tokens of the rank do
            self._starts[asked] = (
                starts_of_box(shape, offsets, size) if rows_N is None else starts_of_rows(rows_N, shape[1])
            )
        return self._starts[asked]
