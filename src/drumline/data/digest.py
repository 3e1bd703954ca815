"""Digests of files and texts: XXH3-128, which reads at memory speed and finds every accidental change.

It is no protection against a forger. Source: https://xxhash.com
"""

from collections.abc import Callable
from pathlib import Path

import xxhash

CHUNK_BYTES = 1 << 22


def new_digest() -> "xxhash.xxh3_128":
    """Starts a running digest with `update(bytes)` and `hexdigest()`."""
    return xxhash.xxh3_128()


def digest_of(*parts: str | bytes) -> str:
    """Returns the digest of a sequence of parts, as hex; where one part ends is part of what is digested."""
    running = new_digest()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        running.update(len(data).to_bytes(8, "little"))
        running.update(data)
    return running.hexdigest()


def digest_of_file(path: Path, report: Callable[[int], None] = lambda done: None) -> str:
    """Digests a file, reading a few MiB at a time.

    Args:
        path: the file.
        report: called with the bytes read so far.

    Returns:
        The digest, as hex.

    Raises:
        OSError: the file cannot be read.
    """
    running = new_digest()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            running.update(chunk)
            done += len(chunk)
            report(done)
    return running.hexdigest()
