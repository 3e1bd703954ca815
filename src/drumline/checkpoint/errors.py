"""What can go wrong with a commit.

DrumlineError
+-- CommitError          a commit cannot be read, or does not hold what was asked for
|   +-- NotACommitError       the folder is missing, foreign, or was never finished
|   +-- DamagedCommitError    it was a commit, but a file of it is missing, cut off or changed
+-- SaveError            a commit was not made; earlier ones are untouched
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drumline.recipe.errors import DrumlineError


class CommitError(DrumlineError):
    """A commit cannot be read, or does not hold what was asked for."""


class NotACommitError(CommitError):
    """The folder is missing, foreign, or was never finished."""


@dataclass(frozen=True)
class Damage:
    """Something wrong in a commit.

    Args:
        file: its name in the folder.
        reason: what is wrong with it.
        tensor: the logical tensor that is hit, if one is.
        rank: the rank that wrote the file, if it is a shard.
    """

    file: str
    reason: str
    tensor: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        hit = [f"tensor {self.tensor}"] if self.tensor else []
        hit += [f"written by rank {self.rank}"] if self.rank is not None else []
        return f"{self.file}: {self.reason}" + (f" ({', '.join(hit)})" if hit else "")


class DamagedCommitError(CommitError):
    """It was a commit, but a file of it is missing, cut off or changed.

    Args:
        path: the folder.
        damages: what is wrong, at least one.
    """

    def __init__(self, path: Path, damages: Sequence[Damage]):
        self.path = path
        self.damages = tuple(damages)
        shown = [f"  {damage}" for damage in self.damages[:8]]
        more = [f"  and {len(self.damages) - 8} more"] if len(self.damages) > 8 else []
        super().__init__("\n".join([f"{path} is damaged and was not loaded:", *shown, *more]))


class SaveError(DrumlineError):
    """A commit was not made; says why, and that earlier commits are untouched."""
