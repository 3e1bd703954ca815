"""Whole files: written durably in large blocks, and read back by ranges.

Blocks go out on two threads, outside the interpreter's lock, and around the page cache where the filesystem allows it:
on the machine of `benchmarks/`, that is five times as fast as a buffered write followed by fsync.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import xxhash

from drumline.storage.filesystem import Filesystem

Result = TypeVar("Result")

_WRITE_BYTES = 8 << 20
_NUM_WRITERS = 2


def digest_of(parts: Sequence[bytes | memoryview]) -> str:
    """The digest of a file's content.

    Args:
        parts: its bytes, in order.

    Returns:
        xxh3_128 in hex.
    """
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def checksum_of(data: bytes | memoryview) -> str:
    """The checksum of a part of a tensor.

    Args:
        data: its bytes.

    Returns:
        xxh3_64 in hex.
    """
    return xxhash.xxh3_64(data).hexdigest()


def digest_of_file(path: Path, block_bytes: int = _WRITE_BYTES) -> str:
    """The digest of a file on disk, read in blocks.

    Args:
        path: the file.
        block_bytes: memory to use.

    Returns:
        As `digest_of` its content.
    """
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(block_bytes))
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(block):
            digest.update(block[:num_read])
    return digest.hexdigest()


def aligned(data: bytes) -> memoryview:
    """A copy of `data` that starts on a page boundary, as O_DIRECT wants it."""
    if not data:
        return memoryview(b"")
    pages = mmap.mmap(-1, len(data), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages[:] = data
    return memoryview(pages)


def write_file(
    filesystem: Filesystem,
    path: Path,
    parts: Sequence[memoryview],
    *,
    direct: bool = False,
    meanwhile: Callable[[], Result] = lambda: None,
) -> Result:
    """Writes a new file and makes its bytes durable (not its name: sync the folder).

    Args:
        filesystem: what writes.
        path: the file; an older one of this name is emptied.
        parts: its bytes, in order; they must not change until this returns.
        direct: go around the page cache where possible. Every part but the last should be whole blocks in page-aligned
            memory.
        meanwhile: runs on this thread while the blocks are being written.

    Returns:
        What `meanwhile` returned.

    Raises:
        OSError: it could not be written; nothing is left at `path`, as far as that was possible.
    """
    try:
        fd = filesystem.create(path, direct=direct)
        try:
            result = _write_blocks(filesystem, fd, _blocks(parts), meanwhile)
            filesystem.sync(fd)
        finally:
            filesystem.close(fd)
    except OSError:
        with contextlib.suppress(OSError):
            filesystem.remove(path)
        raise
    return result


def write_bytes(filesystem: Filesystem, path: Path, data: bytes) -> None:
    """Writes a small new file and makes its bytes durable.

    Args:
        filesystem: what writes.
        path: the file.
        data: its content.

    Raises:
        OSError: it could not be written.
    """
    write_file(filesystem, path, [memoryview(data)])


def read_range(fd: int, into: memoryview, offset: int) -> None:
    """Fills `into` from a file.

    Args:
        fd: an open file.
        into: where the bytes go, one-dimensional and writable.
        offset: of the first byte in the file.

    Raises:
        OSError: the file ends before `into` is full, or cannot be read.
    """
    while len(into):
        num_read = os.preadv(fd, [into], offset)
        if num_read == 0:
            raise OSError(errno.EIO, f"the file ends {len(into):,} bytes too early")
        into, offset = into[num_read:], offset + num_read


def _blocks(parts: Sequence[memoryview]) -> list[tuple[int, memoryview]]:
    blocks, offset = [], 0
    for part in parts:
        for start in range(0, len(part), _WRITE_BYTES):
            block = part[start : start + _WRITE_BYTES]
            blocks.append((offset, block))
            offset += len(block)
    return blocks


def _write_blocks(
    filesystem: Filesystem, fd: int, blocks: list[tuple[int, memoryview]], meanwhile: Callable[[], Result]
) -> Result:
    # The last block goes last and alone: where it is no whole number of blocks it turns O_DIRECT off for the file.
    *first, last = blocks or [(0, memoryview(b""))]
    if not first:
        filesystem.write(fd, last[1], last[0])
        return meanwhile()
    with ThreadPoolExecutor(_NUM_WRITERS) as writers:
        writes = [writers.submit(filesystem.write, fd, block, offset) for offset, block in first]
        try:
            result = meanwhile()
            for write in writes:
                write.result()
        except BaseException:
            for write in writes:
                write.cancel()
            raise
    filesystem.write(fd, last[1], last[0])
    return result
