"""How ranks meet while they write: through files in the shared temporary folder, never through a collective.

A rank that has written its shard leaves a part file; one that failed leaves an error file. Rank 0 waits for all parts;
the others wait for the commit to appear. Nobody waits for ever: an error ends the wait, and so does the deadline.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from drumline.checkpoint.errors import CommitError, SaveError
from drumline.checkpoint.index import MARKER, Marker, Part, from_bytes, to_bytes
from drumline.storage import Filesystem, write_bytes

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


def leave_part(filesystem: Filesystem, folder: Path, part: Part) -> None:
    """Tells rank 0 what this rank wrote.

    Args:
        filesystem: what writes.
        folder: the temporary folder.
        part: what was written; it is durable already.

    Raises:
        OSError: it could not be written.
    """
    _publish(filesystem, folder / _part_name(part.rank), to_bytes(part))


def leave_error(filesystem: Filesystem, folder: Path, rank: int, message: str) -> None:
    """Tells the other ranks that this one failed, if that is still possible.

    Args:
        filesystem: what writes.
        folder: the temporary folder.
        rank: this rank.
        message: why.
    """
    with contextlib.suppress(OSError):
        data = json.dumps({"rank": rank, "message": message}).encode()
        _publish(filesystem, folder / f"error-{rank:05d}.json", data)


def collect_parts(folder: Path, world_size: int, deadline: float) -> list[Part]:
    """Waits until every rank has left its part (on rank 0).

    Args:
        folder: the temporary folder.
        world_size: number of ranks.
        deadline: when to give up, on the monotonic clock.

    Returns:
        The parts, by rank.

    Raises:
        SaveError: a rank failed, or did not come in time; the message names it.
    """
    parts: dict[int, Part] = {}

    def is_complete() -> bool:
        names = {path.name for path in folder.iterdir()}
        for name in sorted(names):
            if name.startswith("error-") and name.endswith(".json"):
                raise SaveError(_read_error(folder / name))
        for rank in range(world_size):
            path = folder / _part_name(rank)
            if rank not in parts and path.name in names:
                parts[rank] = from_bytes(Part, path.read_bytes(), path)
        return len(parts) == world_size

    if not _poll(is_complete, deadline):
        missing = [rank for rank in range(world_size) if rank not in parts]
        raise SaveError(f"{_ranks(missing)} did not finish writing in time")
    return [parts[rank] for rank in range(world_size)]


def await_commit(folder: Path, target: Path, save: str, deadline: float) -> None:
    """Waits until rank 0 has made the commit (on the other ranks).

    Args:
        folder: the temporary folder.
        target: the folder of the commit.
        save: which save it is.
        deadline: when to give up, on the monotonic clock.

    Raises:
        SaveError: rank 0 gave up, or did not come in time.
    """

    def is_committed() -> bool:
        is_given_up = not folder.exists()  # asked first: the commit takes the folder away by renaming it
        if _is_of(target, save):
            return True
        if (folder / "error-00000.json").exists():
            raise SaveError(_read_error(folder / "error-00000.json"))
        if is_given_up:
            raise SaveError("rank 0 gave the save up")
        return False

    if not _poll(is_committed, deadline):
        raise SaveError("rank 0 did not commit in time")


def await_errors(folder: Path, world_size: int, timeout_s: float) -> None:
    """Waits, for `timeout_s` at most, until every rank has left an error file and so has seen that the save failed."""

    def is_complete() -> bool:
        return not folder.exists() or len(list(folder.glob("error-*.json"))) == world_size

    _poll(is_complete, time.monotonic() + timeout_s)


def left_by_ranks(folder: Path) -> list[Path]:
    """The files of the rendezvous itself, which are no part of the commit."""
    return [path for path in sorted(folder.iterdir()) if path.name.startswith(("part-", "error-"))]


def _is_of(target: Path, save: str) -> bool:
    with contextlib.suppress(OSError, CommitError):
        return from_bytes(Marker, (target / MARKER).read_bytes(), target / MARKER).save == save
    return False


def _publish(filesystem: Filesystem, path: Path, data: bytes) -> None:
    # Under another name first, so that who polls for the file never reads half of it.
    unfinished = path.with_name(path.name + ".unfinished")
    write_bytes(filesystem, unfinished, data)
    filesystem.rename(unfinished, path)


def _poll(is_done: Callable[[], bool], deadline: float) -> bool:
    for pause_s in _pauses():
        if is_done():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return False


def _pauses() -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)


def _part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _read_error(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"a rank failed and left {path.name}"


def _ranks(missing: list[int]) -> str:
    shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"rank {shown}" if len(missing) == 1 else f"ranks {shown}"
