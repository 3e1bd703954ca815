"""The run directory: where it is, who may write there, and the two files that say what the run is."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from drumline.recipe.errors import DrumlineError
from drumline.recipe.sections import Recipe

CHECKPOINTS = "checkpoints"


class FolderError(DrumlineError):
    """The run directory cannot be used."""


def run_folder(recipe: Recipe) -> Path:
    """The run directory of a recipe: `run.dir`, or `runs/<name>`."""
    return Path(recipe.run.dir or f"runs/{recipe.run.name or recipe.name}")


class FolderLock:
    """Holds a run directory for one training at a time; the system lets go of it when the process ends, however it
    ends.

    Args:
        folder: the run directory; it is made where missing.

    Raises:
        FolderError: the path is no folder, cannot be written, or another training holds it.
    """

    def __init__(self, folder: Path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise FolderError(f"run directory {folder}: {error.strerror}; choose another with run.dir=...") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            raise FolderError(
                f"another training (process {owner}) is writing to {folder}; wait for it, stop it, or set run.dir=..."
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        """Lets go."""
        self._file.close()


def describe_run(folder: Path, recipe: Recipe, environment: dict[str, Any]) -> None:
    """Writes recipe.json (resolved) and environment.json."""
    for name, content in (("recipe.json", recipe.model_dump(mode="json")), ("environment.json", environment)):
        temporary = folder / f"{name}.tmp"
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, folder / name)
