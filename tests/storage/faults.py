"""Filesystems that fail: one dies after the k-th operation, one also loses what was not synced, one is full."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

from drumline.storage import Filesystem


class Killed(BaseException):
    """The process is gone: nothing in it may act on this."""


class DyingFilesystem(Filesystem):
    """Carries out `num_operations` operations; in the next one it dies, in the middle of it if that is a write.

    Args:
        num_operations: how many are carried out.
    """

    def __init__(self, num_operations: int):
        self.left = num_operations
        self.is_dead = False
        self._lock = threading.RLock()

    def _step(self) -> None:
        with self._lock:
            if self.left == 0 or self.is_dead:
                if not self.is_dead:
                    self.is_dead = True
                    self.die()
                raise Killed
            self.left -= 1

    def die(self) -> None:
        """What the machine does when it goes."""

    def make_folder(self, path: Path) -> None:
        self._step()
        super().make_folder(path)

    def create(self, path: Path, *, direct: bool = False) -> int:
        self._step()
        return super().create(path, direct=False)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        with self._lock:
            if self.left == 0 and not self.is_dead:
                os.pwrite(fd, data[: len(data) // 2], offset)
            self._step()
            super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._step()

    def sync_folder(self, path: Path) -> None:
        self._step()

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        self._step()
        return super().exchange(one, other)

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)

    def remove_empty_folder(self, path: Path) -> None:
        self._step()
        super().remove_empty_folder(path)


class PowerCutFilesystem(DyingFilesystem):
    """Dies like the above, and loses what was not synced: bytes of files, and (if `loses_names`) names in folders.

    Each operation leaves an undo, which a sync of the file or folder discards; on the cut, those left are run, newest
    first. Folders and files are held open, so that an undo finds them whatever their names are by then.

    Args:
        num_operations: how many are carried out.
        loses_names: created, renamed and removed names are lost, too, unless their folder was synced.
    """

    def __init__(self, num_operations: int, *, loses_names: bool):
        super().__init__(num_operations)
        self._loses_names = loses_names
        self._undos: list[tuple[object, Callable[[], None]]] = []
        self._open: list[int] = []

    def _name_undo(self, folder: Path, undo: Callable[[], None]) -> None:
        if self._loses_names:
            self._undos.append((folder.stat().st_ino, undo))

    def _hold(self, path: Path) -> int:
        self._open.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        return self._open[-1]

    def die(self) -> None:
        for _, undo in reversed(self._undos):
            undo()
        for fd in self._open:
            os.close(fd)

    def make_folder(self, path: Path) -> None:
        is_new = not path.exists()
        super().make_folder(path)
        if is_new:
            parent = self._hold(path.parent)
            self._name_undo(path.parent, lambda: os.rmdir(path.name, dir_fd=parent))

    def create(self, path: Path, *, direct: bool = False) -> int:
        with self._lock:
            fd = super().create(path)
            parent = self._hold(path.parent)
            self._name_undo(path.parent, lambda: os.unlink(path.name, dir_fd=parent))
            content = os.dup(fd)
            self._open.append(content)
            self._undos.append(
                (("file", os.fstat(fd).st_ino), lambda: os.ftruncate(content, os.fstat(content).st_size // 2))
            )
            return fd

    def sync(self, fd: int) -> None:
        with self._lock:
            super().sync(fd)
            self._discard(("file", os.fstat(fd).st_ino))

    def sync_folder(self, path: Path) -> None:
        with self._lock:
            super().sync_folder(path)
            self._discard(path.stat().st_ino)

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            super().rename(source, target)
            parent = self._hold(target.parent)
            self._name_undo(
                target.parent, lambda: os.rename(target.name, source.name, src_dir_fd=parent, dst_dir_fd=parent)
            )

    def exchange(self, one: Path, other: Path) -> bool:
        with self._lock:
            done = super().exchange(one, other)
            self._name_undo(other.parent, lambda: Filesystem().exchange(one, other))
            return done

    def remove(self, path: Path) -> None:
        with self._lock:
            content = path.read_bytes() if path.exists() else None
            super().remove(path)
            if content is not None:
                parent = self._hold(path.parent)

                def restore() -> None:
                    fd = os.open(path.name, os.O_WRONLY | os.O_CREAT, dir_fd=parent)
                    os.write(fd, content)
                    os.close(fd)

                self._name_undo(path.parent, restore)

    def remove_empty_folder(self, path: Path) -> None:
        # What was removed inside cannot come back without its folder; that it is gone is the harder case to survive.
        self._step()
        self._discard(path.stat().st_ino)
        Filesystem.remove_empty_folder(self, path)

    def _discard(self, key: object) -> None:
        self._undos = [(owner, undo) for owner, undo in self._undos if owner != key]


def _halve(fd: int) -> None:
    os.ftruncate(fd, os.fstat(fd).st_size // 2)


class FullFilesystem(Filesystem):
    """Has room for so many bytes; what is removed gives room back.

    Args:
        num_bytes: room.
    """

    def __init__(self, num_bytes: int):
        self.room = num_bytes
        self._lock = threading.Lock()

    def create(self, path: Path, *, direct: bool = False) -> int:
        return super().create(path, direct=False)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        with self._lock:
            fits = min(len(data), self.room)
            super().write(fd, data[:fits], offset)
            self.room -= fits
            if fits < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def remove(self, path: Path) -> None:
        if path.exists():
            self.room += path.stat().st_size
        super().remove(path)
