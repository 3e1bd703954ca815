"""The few operations on a filesystem that change something: the seam where tests stop a save at any instant.

Whatever is written goes through a `Filesystem`, so that a test can replace it by one that stops after the k-th
operation, loses what was not synced, or has no space left. A name is durable only after its folder was synced; a file's
bytes only after the file was.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_DIRECT_ALIGNMENT = 4096
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


class Filesystem:
    """Operations that create, change or remove files; each of them is one system call, or nearly so."""

    def make_folder(self, path: Path) -> None:
        """Creates a folder and its parents; does nothing where it exists."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path, *, direct: bool = False) -> int:
        """Opens a new empty file for writing.

        Args:
            path: the file; its folder exists. An older file of this name is emptied.
            direct: ask for O_DIRECT, which the filesystem may refuse: the file is then opened without it.

        Returns:
            The file descriptor. `is_direct` says whether O_DIRECT was granted.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        if direct and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):
                return os.open(path, flags | os.O_DIRECT, 0o644)
        return os.open(path, flags, 0o644)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """Writes all of `data` at `offset`, whatever the kernel takes at a time.

        Args:
            fd: an open file.
            data: the bytes, one-dimensional.
            offset: where they go, in bytes from the start of the file.
        """
        while len(data):
            num_written = self._write_some(fd, data, offset)
            data, offset = data[num_written:], offset + num_written

    def _write_some(self, fd: int, data: memoryview, offset: int) -> int:
        was_direct = is_direct(fd)
        # O_DIRECT takes whole blocks only: the tail, and what a short write left unaligned, go through the page cache.
        if was_direct and (offset % _DIRECT_ALIGNMENT or len(data) % _DIRECT_ALIGNMENT):
            whole = 0 if offset % _DIRECT_ALIGNMENT else len(data) - len(data) % _DIRECT_ALIGNMENT
            if whole:
                data = data[:whole]
            else:
                set_direct(fd, False)
        try:
            return os.pwrite(fd, data, offset)
        except OSError as error:
            # Asked before the write, not now: another thread may just have turned O_DIRECT off for the same reason.
            if error.errno not in _UNSUPPORTED or not was_direct:
                raise
            set_direct(fd, False)  # this filesystem wants another alignment, or granted O_DIRECT without meaning it
            return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        """Makes a file's bytes durable."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Closes a file."""
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Makes the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:  # some network filesystems cannot sync a folder, and need not
                raise
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file or folder another name, at once; a file at `target` is replaced."""
        os.rename(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Swaps two names at once.

        Args:
            one: an existing path.
            other: another one, on the same filesystem.

        Returns:
            False where the system cannot do that; nothing happened then.
        """
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if renameat2 is None:
            return False
        names = os.fsencode(one), os.fsencode(other)
        if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
            return True
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return False
        raise OSError(code, os.strerror(code), str(one), None, str(other))

    def remove(self, path: Path) -> None:
        """Removes a file; does nothing where there is none."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Removes a folder and all that is in it; does nothing where there is none."""
        if path.is_symlink() or not path.is_dir():
            self.remove(path)
            return
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.is_symlink():
                self.remove_tree(child)
            else:
                self.remove(child)
        with contextlib.suppress(FileNotFoundError):
            self.remove_empty_folder(path)

    def remove_empty_folder(self, path: Path) -> None:
        """Removes an empty folder."""
        path.rmdir()

    def free_bytes(self, path: Path) -> int:
        """Space that is left for an ordinary user on the filesystem of `path`, bytes."""
        return shutil.disk_usage(path).free


def is_direct(fd: int) -> bool:
    """Whether writes to this file go around the page cache (O_DIRECT)."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def set_direct(fd: int, direct: bool) -> None:
    """Turns O_DIRECT on or off on an open file."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if direct else flags & ~flag)
