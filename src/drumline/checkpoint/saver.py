"""Saving while training goes on: copy, return, write behind.

`save` copies this rank's share into host memory and returns; a thread writes it and makes the commit. All ranks call it
for the same steps in the same order. There is one buffer: a save that comes while the one before is still being written
waits for it, so memory is bounded by one snapshot.
"""

import functools
import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from drumline.checkpoint.errors import SaveError
from drumline.checkpoint.folder import Folder
from drumline.checkpoint.handle import CommitHandle
from drumline.checkpoint.index import CHUNK_BYTES, ENVIRONMENT, RECIPE, STATE
from drumline.checkpoint.piece import Piece
from drumline.checkpoint.rendezvous import await_errors
from drumline.checkpoint.snapshot import Snapshot, Snapshots
from drumline.checkpoint.writing import Save, carry_out
from drumline.recipe.errors import DrumlineError
from drumline.storage import Filesystem

_log = logging.getLogger(__name__)

# How long leaving waits: for a save under way when the run failed, and for other ranks to see why a save failed.
_FAREWELL_S = 5.0


class Saver:
    """Makes the commits of a run. A context manager: leaving it waits for the last save.

    On rank 0 it first removes what killed saves left in the folder, so make it before looking for the newest commit.
    With several ranks, making it is collective (the ranks agree on a name for this session) unless `session` is given;
    nothing later is.

    Args:
        directory: the folder of commits, `RUN/checkpoints`; it is made if need be.
        rank: this rank.
        world_size: number of ranks.
        keep: newest commits to keep.
        asynchronous: `save` returns when the copy is done; else when the commit is durable.
        recipe: the resolved recipe as JSON values; goes into every commit. Rank 0's is kept, of this and the next.
        environment: what the run runs on; goes into every commit.
        timeout_s: longest wait for other ranks in one save, seconds.
        session: names this start of the run; the same on all ranks and never used before.
        filesystem: what writes.
        direct: write around the page cache where the filesystem allows it.
        chunk_bytes: largest part of a tensor that has a checksum of its own.

    Raises:
        SaveError: the folder cannot be made or cleaned.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        keep: int = 3,
        asynchronous: bool = True,
        recipe: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        session: str | None = None,
        filesystem: Filesystem | None = None,
        direct: bool = True,
        chunk_bytes: int = CHUNK_BYTES,
    ):
        self._folder = Folder(Path(directory), filesystem)
        self._rank = rank
        self._world_size = world_size
        self._keep = keep
        self._asynchronous = asynchronous
        self._documents = {
            RECIPE: _to_json(recipe or {}, "the recipe"),
            ENVIRONMENT: _to_json(environment or {}, "the environment"),
        }
        self._timeout_s = timeout_s
        self._direct = direct
        self._chunk_bytes = chunk_bytes
        self._snapshots = Snapshots(rank)
        self._num_saves = 0
        self._last: CommitHandle | None = None
        self._failed: list[Path] = []
        self._is_closed = False
        problem = self._open(session) if rank == 0 else None
        # The others learn the session only after rank 0 has cleaned, so none of them can write into what is being
        # removed.
        self._session, problem = _agree(rank, world_size, session, problem)
        if problem:
            raise SaveError(problem)

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """Begins to make room for the snapshots, so that the first save stalls no longer than the others.

        It returns at once; a thread touches the memory.

        Args:
            pieces: as they will be saved.

        Raises:
            DrumlineError: they contradict each other.
        """
        self.wait()
        self._snapshots.prepare(pieces)

    def save(self, step: int, pieces: Sequence[Piece], state: Mapping[str, Any]) -> CommitHandle:
        """Saves a step.

        Args:
            step: optimizer steps that are done.
            pieces: this rank's pieces. Their tensors may be changed as soon as this returns.
            state: whatever the run wants back, as JSON values; rank 0's is kept.

        Returns:
            The save, under way if asynchronous.

        Raises:
            SaveError: an earlier save failed and nobody was told yet; or this one did, and is synchronous.
            DrumlineError: the pieces contradict each other, or the state is not JSON.
        """
        if self._is_closed:
            raise DrumlineError("the saver is closed")
        began = time.perf_counter()
        self.wait()
        save = Save(
            folder=self._folder,
            step=step,
            save=f"{self._session}-{self._num_saves + 1:04d}",
            rank=self._rank,
            world_size=self._world_size,
            keep=self._keep,
            documents={STATE: _to_json(state, "the state"), **self._documents},
            timeout_s=self._timeout_s,
            direct=self._direct,
            chunk_bytes=self._chunk_bytes,
        )
        snapshot = self._snapshots.take(pieces)
        self._num_saves += 1
        handle = self._last = CommitHandle(save.target, step)
        handle.run(functools.partial(self._write, save, snapshot))
        del snapshot
        if not self._asynchronous:
            handle.wait()
        handle.stall_s = time.perf_counter() - began
        return handle

    def wait(self) -> None:
        """Waits for the save under way, if there is one.

        Raises:
            SaveError: it failed, and nobody was told yet.
        """
        if self._last is not None:
            self._last.settle()
            self._last.raise_unseen()

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for the save under way and gives the memory back.

        Args:
            timeout_s: longest wait, seconds; None: as long as it takes.

        Raises:
            SaveError: that save failed and nobody was told yet, or it is not done in time (it is then given up).
        """
        self._is_closed = True
        if self._last is not None:
            if not self._last.settle(timeout_s):
                raise SaveError(f"step {self._last.step} was still being written after {timeout_s:g} s and is given up")
            self._snapshots.release()
            if self._rank == 0 and self._failed:
                await_errors(self._failed[-1], self._world_size, _FAREWELL_S)
            self._remove_failed()
            self.wait()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close(timeout_s=_FAREWELL_S)
        except Exception as error:  # what ended the run matters more
            _log.warning("%s", error)

    def _write(self, save: Save, snapshot: Snapshot) -> int:
        try:
            num_bytes = carry_out(save, snapshot)
            self._remove_failed()  # every rank took part in this save, so every rank has seen the failure before it
            return num_bytes
        except BaseException:
            self._failed.append(save.unfinished)
            raise

    def _open(self, session: str | None) -> str | None:
        try:
            self._folder.filesystem.make_folder(self._folder.path)
            for path in self._folder.clean(session):
                _log.warning("removed %s, which an interrupted save left behind", path)
        except OSError as error:
            return f"commits cannot be kept in {self._folder.path}: {error.strerror or error}"
        return None

    def _remove_failed(self) -> None:
        # Their error files were left for the other ranks to see.
        while self._rank == 0 and self._failed:
            self._folder.remove_quietly(self._failed.pop())


def _to_json(values: Mapping[str, Any], what: str) -> bytes:
    try:
        return json.dumps(dict(values), allow_nan=False, indent=1).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DrumlineError(f"{what} cannot be stored as JSON: {error}") from error


def _agree(rank: int, world_size: int, session: str | None, problem: str | None) -> tuple[str, str | None]:
    agreed: list[Any] = [session or uuid.uuid4().hex[:12], problem]
    if world_size > 1 and session is None:
        if not dist.is_initialized():
            raise DrumlineError("a saver of several ranks needs a process group, or a session that they agree on")
        dist.broadcast_object_list(agreed, src=0)
    return agreed[0], agreed[1]
