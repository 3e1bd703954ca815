"""The folder of commits of a run: which are there, which one is newest, and which ones go.

    step-00000010/                 a commit
    .tmp-step-00000020-SAVE/       a save under way, or one that was killed
    .old-step-00000010-SAVE/       the commit of that step before it was saved again
    .trash-step-00000005-SAVE/     a pruned commit that is being deleted

A commit appears and disappears by one rename, so that no half of one ever bears its name.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from drumline.checkpoint.commit import Commit, open_commit
from drumline.checkpoint.errors import CommitError
from drumline.checkpoint.index import MARKER, step_name, step_of, unfinished_of
from drumline.storage import Filesystem

COMMITS = "checkpoints"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A folder that bears a commit's name.

    Args:
        path: the folder.
        step: in its name.
        commit: what is there, if it is whole.
        problem: else why it is not.
    """

    path: Path
    step: int
    commit: Commit | None
    problem: str = ""


class Folder:
    """A folder of commits.

    Args:
        path: the folder; it need not exist.
        filesystem: what writes.
    """

    def __init__(self, path: Path, filesystem: Filesystem | None = None):
        self.path = path
        self.filesystem = filesystem or Filesystem()

    def commit(self, step: int) -> Path:
        """Where the commit of a step lies."""
        return self.path / step_name(step)

    def unfinished(self, kind: str, step: int, save: str) -> Path:
        """The name under which a save keeps what is no commit: kind is `tmp`, `old` or `trash`."""
        return self.path / f".{kind}-{step_name(step)}-{save}"

    def found(self) -> list[Found]:
        """All that bears a commit's name, newest step last; each is opened, no tensor is read."""
        return [_look(path, step) for step, path in self._steps()]

    def steps(self) -> list[int]:
        """The steps of all that bears a commit's name, whole or not, ascending."""
        return [step for step, _ in self._steps()]

    def newest(self, warn: Callable[[str], None]) -> Commit | None:
        """The commit of the highest step that is whole.

        Args:
            warn: is told about each newer one that is not.

        Returns:
            The commit; None where there is none.
        """
        for step, path in reversed(self._steps()):
            found = _look(path, step)
            if found.commit:
                return found.commit
            warn(f"skipped: {found.problem}")
        return None

    def newest_step(self) -> str:
        """The name of the newest commit, or nothing."""
        commit = self.newest(lambda problem: None)
        return commit.path.name if commit else ""

    def publish(self, unfinished: Path, step: int, save: str) -> None:
        """Gives a finished save its name. Everything in it is durable; afterwards its name is, too.

        Args:
            unfinished: the folder.
            step: of the commit.
            save: which save it is.

        Raises:
            OSError: the filesystem refused.
        """
        filesystem, target = self.filesystem, self.commit(step)
        old = None
        if target.exists() or target.is_symlink():
            if filesystem.exchange(unfinished, target):
                old = unfinished
            else:
                old = self.unfinished("old", step, save)
                filesystem.rename(target, old)
                filesystem.rename(unfinished, target)
        else:
            filesystem.rename(unfinished, target)
        filesystem.sync_folder(self.path)
        if old is not None:
            self._put_aside(old, step, save)

    def prune(self, keep: int, step: int, save: str) -> None:
        """Deletes commits that are older than the newest `keep` whole ones, once that of `step` is durable.

        Later steps than `step` are neither counted nor deleted. What is no commit of drumline is never touched. A
        failure to delete is logged: it costs space, no more.

        Args:
            keep: commits to keep, that of `step` among them.
            step: of the commit just made.
            save: which save it is.
        """
        try:
            older = [found for found in self.found() if found.step <= step]
            whole = [found.step for found in older if found.commit]
            if step not in whole:
                _log.warning("%s cannot be read back; no commit was pruned", self.commit(step))
                return
            oldest_kept = whole[-keep:][0]
            for found in older:
                if found.step < oldest_kept and (found.path / MARKER).exists():
                    trash = self.unfinished("trash", found.step, save)
                    self.filesystem.rename(found.path, trash)
                    self.filesystem.sync_folder(self.path)
                    self.filesystem.remove_tree(trash)
        except OSError as error:
            _log.warning("old commits in %s could not be pruned: %s", self.path, error)

    def clean(self, session: str | None = None) -> list[Path]:
        """Removes what killed saves left behind. Only while no other session saves.

        Args:
            session: the saves of this one are let be: another rank of it may have begun.

        Returns:
            The folders that were removed, or given their name back.

        Raises:
            OSError: the filesystem refused.
        """
        cleaned = []
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else []:
            kind_and_step = unfinished_of(path.name)
            if kind_and_step is None or (session and f"-{session}-" in path.name):
                continue
            kind, step = kind_and_step
            if kind == "old" and not self.commit(step).exists():
                self.filesystem.rename(path, self.commit(step))  # killed between the two renames of `publish`
            else:
                self.filesystem.remove_tree(path)
            cleaned.append(path)
        if cleaned:
            self.filesystem.sync_folder(self.path)
        return cleaned

    def remove_quietly(self, path: Path) -> None:
        """Removes a temporary folder if that is possible; if not, the next start does."""
        with contextlib.suppress(OSError):
            self.filesystem.remove_tree(path)

    def _steps(self) -> list[tuple[int, Path]]:
        try:
            paths = list(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((step, path) for path in paths if (step := step_of(path.name)) is not None)

    def _put_aside(self, old: Path, step: int, save: str) -> None:
        if (old / MARKER).exists():
            self.filesystem.remove_tree(old)
        else:
            # Not ours to delete: something else lay where this commit belongs.
            aside = self.path / f"foreign-{step_name(step)}-{save}"
            self.filesystem.rename(old, aside)
            _log.warning("%s was no commit of drumline; it is now %s", self.commit(step), aside)


def newest_commit(directory: Path, warn: Callable[[str], None] = _log.warning) -> Path | None:
    """The newest whole commit of a run.

    Args:
        directory: the folder of commits; it need not exist.
        warn: is told about each newer folder that was skipped, and why.

    Returns:
        The commit's folder; None where there is none.
    """
    commit = Folder(directory).newest(warn)
    return commit.path if commit else None


def commits_directory(path: Path) -> Path:
    """Where the commits of a run lie: `RUN/checkpoints`, or the path itself where that is it.

    Args:
        path: a run directory, or a folder of commits.

    Returns:
        The folder of commits.

    Raises:
        CommitError: there is neither.
    """
    if (path / COMMITS).is_dir():
        return path / COMMITS
    if path.is_dir() and (path.name == COMMITS or Folder(path).steps()):
        return path
    what = "does not exist" if not path.exists() else f"has no folder {COMMITS} and no commit in it"
    raise CommitError(f"{path} {what}; give a run directory, or a commit such as RUN/{COMMITS}/step-00000100")


def _look(path: Path, step: int) -> Found:
    try:
        commit = open_commit(path)
        if commit.step != step:
            return Found(path, step, None, f"{path} holds step {commit.step}: it was renamed")
        return Found(path, step, commit)
    except CommitError as error:
        return Found(path, step, None, str(error))
