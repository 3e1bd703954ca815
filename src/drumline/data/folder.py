"""A folder that appears whole or not at all, built by one process at a time.

It is written beside its final place, under a name that starts with a dot, synced, and renamed. A lock that the kernel
drops when its holder dies (flock) keeps other processes out; what an earlier, killed build left is removed by the
next. Where the file system has no locks, the rename alone decides who wins.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from drumline.recipe.errors import DrumlineError


@contextlib.contextmanager
def building(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Gives a fresh folder to write into, and puts it at `out` when the block ends without an exception.

    The caller holds `locked(out)`.

    Args:
        out: where the folder shall be; may not exist, except empty or with overwrite.
        overwrite: replace what is there, once the new folder is whole.

    Yields:
        The folder to write into.

    Raises:
        DrumlineError: the folder cannot be made or moved into place.
    """
    partial = out.with_name(f".{out.name}.partial")
    replaced = out.with_name(f".{out.name}.replaced")
    try:
        _remove(partial)
        if replaced.exists() and not out.exists():
            replaced.rename(out)  # an overwrite was killed between its two renames: the old folder is still the folder
        _remove(replaced)
        partial.mkdir(parents=True)
    except OSError as error:
        raise DrumlineError(f"cannot make {partial}: {error.strerror}") from error
    try:
        yield partial
        _sync(partial)
        if overwrite and out.exists():
            out.rename(replaced)
        partial.rename(out)
        _sync_folder(out.parent)
        _remove(replaced)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise DrumlineError(f"{out} appeared while it was being prepared: another process made it") from error
        raise


@contextlib.contextmanager
def locked(out: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keeps every other process that asks for the same lock out of the block.

    Args:
        out: what the lock is for; the lock is a file beside it, removed when it is given up.
        waiting: called once where another process holds the lock.

    Raises:
        DrumlineError: the lock's folder cannot be made or written.
    """
    path = out.with_name(f".{out.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquire(path, waiting)
    except OSError as error:
        why = "not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise DrumlineError(f"cannot write in {path.parent}: {why}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _acquire(path: Path, waiting: Callable[[], None]) -> int:
    told = False
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                waiting()
                told = True
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                return handle
            os.close(handle)
            raise
        # The one who held the lock has removed its file: then this lock is on a file that nobody else will open.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == path.stat().st_ino:
                return handle
        os.close(handle)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
