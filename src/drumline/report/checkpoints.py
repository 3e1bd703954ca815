"""The checkpoints of a run, as rows of a table."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Checkpoint:
    """One folder among a run's checkpoints.

    Attributes:
        name: of the folder.
        step: steps done when it was made.
        num_bytes: size of its files on disk.
        problem: why it is not whole; empty where it is.
    """

    name: str
    step: int
    num_bytes: int
    problem: str = ""

    @property
    def is_whole(self) -> bool:
        """It can be resumed from, as far as can be told without reading its tensors."""
        return not self.problem


def read_checkpoints(folder: Path) -> tuple[Checkpoint, ...]:
    """Lists the checkpoints of a run, without reading tensors.

    Args:
        folder: the run's `checkpoints`.

    Returns:
        All that bears a commit's name, by rising step; empty where there is no folder.
    """
    if not folder.is_dir():
        return ()
    # Loads torch, which a run without checkpoints need not wait for.
    from drumline.checkpoint.folder import Folder

    return tuple(
        Checkpoint(found.path.name, found.step, _num_bytes(found.path), found.problem)
        for found in Folder(folder).found()
    )


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
