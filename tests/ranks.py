"""Runs a test on several forked ranks.

Each rank is forked from the pytest process, which has torch and its distributed parts imported already (0.1 s
instead of 9 s). The ranks meet through a FileStore. Whatever a rank raises is shown by the parent, the first
failing rank first.

    @ranks(2)
    def test_something(tmp_path): ...       # runs in every rank, with torch.distributed initialized (gloo)
"""

import functools
import os
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

torch.set_num_threads(1)  # a child forked from a parent that ever ran two OpenMP threads deadlocks


def run_ranks(num_ranks: int, body: Callable[[], None], timeout_s: float = 120.0) -> None:
    """Runs `body` in `num_ranks` forked processes and raises the first failure.

    Raises:
        AssertionError: a rank raised, died or did not finish in time; carries its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = {}
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _run_one(rank, num_ranks, Path(folder), body, timeout_s)
            pids[pid] = rank
        failures = _wait(pids, Path(folder), timeout_s)
    if failures:
        raise AssertionError("\n".join(failures))


def ranks(num_ranks: int, timeout_s: float = 120.0):
    """Decorates a test so that it runs on `num_ranks` forked ranks."""

    def decorate(test):
        @functools.wraps(test)
        def wrapped(*args, **kwargs):
            run_ranks(num_ranks, lambda: test(*args, **kwargs), timeout_s)

        return wrapped

    return decorate


def _run_one(rank: int, num_ranks: int, folder: Path, body: Callable[[], None], timeout_s: float) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks)
        )
        store = dist.FileStore(str(folder / "store"), num_ranks)
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


def _wait(pids: dict[int, int], folder: Path, timeout_s: float) -> list[str]:
    deadline = time.monotonic() + timeout_s
    failures = []
    while pids and time.monotonic() < deadline:
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = pids.pop(pid)
                if status:
                    failures.append(f"rank {rank} ended with status {status}")
                    deadline = min(deadline, time.monotonic() + 5.0)
        time.sleep(0.005)
    for pid, rank in pids.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        failures.append(f"rank {rank} did not finish and was killed")
    raised = [path.read_text() for path in sorted(folder.glob("failure-*"))]
    return raised or failures
