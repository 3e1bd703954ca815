"""Ranks forked from this process, for what lives as long as it does: proofs of a layout, and tests.

A fork has torch and its distributed parts imported already (0.1 s instead of 9 s for four ranks). The ranks meet
through a FileStore over gloo. What `drumline train` starts is another matter: `drumline.launch` watches, logs and
restarts.
"""

import faulthandler
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.distributed.fsdp
import torch.distributed.tensor
from torch._C._distributed_c10d import FileStore

from drumline.comm.environment import export
from drumline.numerics.openmp import end_idle_threads
from drumline.recipe.errors import DrumlineError

GRACE_S = 5.0
"""How long the others may go on once a rank has failed: long enough to say what they saw."""

_NAMES_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: |$)")

NUM_LAST_LINES = 100
"""Of what a rank wrote to stderr, where it died without a word of Python: libraries say there why they abort."""


class ForkedRanks:
    """Ranks that run a function, each in its own process, with one thread of computation until it sets more.

    Args:
        num_ranks: how many.
        body: what each runs, with `torch.distributed` initialized and the rank's place in the environment.
        timeout_s: when ranks that have not finished are killed; also the longest that a collective may take.
        log_dir: gets what each rank writes to stderr, `rank-N.log`; None: it goes where this process's goes.
    """

    def __init__(
        self, num_ranks: int, body: Callable[[], None], timeout_s: float = 120.0, *, log_dir: Path | None = None
    ):
        torch.set_num_threads(1)
        end_idle_threads()  # a forked child would wait for them
        self.num_ranks = num_ranks
        self.failures: list[str] = []
        self._meeting = tempfile.TemporaryDirectory()
        self._folder = Path(self._meeting.name)
        self._deadline = time.monotonic() + timeout_s
        self._log_dir = log_dir
        self._pids: dict[int, int] = {}
        self._endings: dict[int, str] = {}
        self._killed: list[str] = []
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _run_one(rank, num_ranks, self._folder, body, timeout_s, log_dir)
            self._pids[pid] = rank

    def poll(self) -> bool:
        """Looks after the ranks; to be called often.

        Returns:
            Whether all have ended. `failures` then says what became of ranks that failed, the first first; empty where
            all is well.
        """
        for pid in list(self._pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = self._pids.pop(pid)
                if status:
                    self._endings[rank] = _ending(rank, os.waitstatus_to_exitcode(status)) + self._last_words(rank)
                    self._deadline = min(self._deadline, time.monotonic() + GRACE_S)
        if self._pids and time.monotonic() > self._deadline:
            self.kill()
        if not self._pids and self._folder.exists():
            self.failures = self._in_order()
            self._meeting.cleanup()
        return not self._pids

    def _in_order(self) -> list[str]:
        """What is told of a rank that died in silence, then what ranks told, then who had to be killed.

        A rank that dies makes its peers raise, for they lose their connection; a rank that raises kills no peer.
        """
        texts = {path: path.read_text() for path in sorted(self._folder.glob("failure-*"))}
        # A rank that was killed as it began to tell has said nothing.
        told = {int(path.name.rsplit("-", 1)[1]): text for path, text in texts.items() if text}
        silent = [text for rank, text in self._endings.items() if rank not in told]
        return [*silent, *told.values(), *self._killed]

    def _last_words(self, rank: int) -> str:
        log = self._log_dir / f"rank-{rank}.log" if self._log_dir is not None else None
        lines = (
            log.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:] if log is not None and log.exists() else []
        )
        return "".join(f"\n  {line}" for line in lines)

    def wait(self) -> list[str]:
        """Waits for all ranks; returns the failures."""
        while not self.poll():
            time.sleep(0.005)
        return self.failures

    def kill(self) -> None:
        """Ends the ranks that still run."""
        for pid, rank in self._pids.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._killed.append(f"rank {rank} did not finish and was killed")
        self._pids.clear()


def run_forked(num_ranks: int, body: Callable[[], None], timeout_s: float, what: str) -> None:
    """Runs a function on ranks to their end; what they say is kept from the terminal.

    Args:
        num_ranks: how many.
        body: what each runs, as for `ForkedRanks`.
        timeout_s: likewise.
        what: begins the message, such as "the baseline failed".

    Raises:
        DrumlineError: a rank failed; with the gist of it.
    """
    with tempfile.TemporaryDirectory(prefix="drumline-logs-") as logs:
        failures = ForkedRanks(num_ranks, body, timeout_s, log_dir=Path(logs)).wait()
    if failures:
        raise DrumlineError(f"{what}: {in_one_line(failures[0])}")


def in_one_line(failure: str) -> str:
    """The gist of a failure: what a traceback ends with, or how a rank ended that left none."""
    lines = failure.strip().splitlines()
    if not (len(lines) > 1 and lines[1].startswith("Traceback")):
        return lines[0]
    # A message may have lines of its own, of which the first comes after the exception's name.
    starts = [index for index, line in enumerate(lines) if _NAMES_EXCEPTION.match(line)]
    return " ".join(line.strip() for line in lines[starts[-1] if starts else -1 :])


def _ending(rank: int, code: int) -> str:
    return (
        f"rank {rank} was ended by {signal.Signals(-code).name}" if code < 0 else f"rank {rank} ended with code {code}"
    )


def _run_one(
    rank: int, num_ranks: int, folder: Path, body: Callable[[], None], timeout_s: float, log_dir: Path | None
) -> None:
    code = 1
    try:
        if log_dir is not None:
            log = os.open(log_dir / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 2)
            faulthandler.enable(2)
        export({"RANK": str(rank), "LOCAL_RANK": str(rank)})
        export({"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)})
        store = FileStore(str(folder / "store"), num_ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s)
        )
        body()
        if dist.is_initialized():  # a body that runs a whole training leaves by itself
            dist.barrier()
            dist.destroy_process_group()
        code = 0
    except BaseException:
        (folder / f"failure-{time.monotonic_ns()}-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
