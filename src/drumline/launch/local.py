"""`--nproc N`: the same command on N ranks of this machine, as one process to start, stop and read.

A rank that dies takes the others down within seconds, and the message names the rank that failed first. A first SIGTERM
or Ctrl-C is passed on: the ranks finish their step, commit and end with 0; a second one ends them at once.
"""

import importlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from drumline.launch.failure import REQUEST_WRONG, RankExit, describe, exit_code, first_failure, signal_name
from drumline.launch.interrupt import Interrupts

# What ranks import anyway; done once in the launcher, every forked rank has it (1.7 s each otherwise).
PRELOAD = (
    "torch._dynamo",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)


def launch_local(
    entry: Callable[[], int | None],
    nproc: int,
    *,
    log_dir: Path,
    device: str = "cpu",
    max_restarts: int = 0,
    timeout_s: float = 600.0,
    grace_s: float = 120.0,
    port: int = 0,
    num_threads: int = 0,
    preload: Sequence[str] = PRELOAD,
    say: Callable[[str], None] | None = None,
) -> int:
    """Runs `entry` on every one of `nproc` local ranks and waits for all.

    On CPU, ranks are forked from the process. It may have computed with several threads before: those that OpenMP keeps
    are ended first, and the process computes with one thread from then on. What the environment says about OpenMP takes
    effect only where it was set before torch was loaded.

    Args:
        entry: picklable; runs one rank. RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
            TORCHELASTIC_RESTART_COUNT are set, and the launcher hosts the store at that address
            (TORCHELASTIC_USE_AGENT_STORE). Returns an exit code, None meaning 0; what it raises is shown once, whatever
            the number of ranks.
        nproc: ranks to start.
        log_dir: gets `rank-N.log` with each rank's stderr; made where missing. Rank 0's stderr goes to the console as
            well.
        device: `cpu` forks the ranks, `cuda` spawns them.
        max_restarts: times that failed ranks are started again, all together; never after a wrong request or a failed
            check.
        timeout_s: how long ranks may go on after one of them has finished, and longest wait for one another, seconds.
        grace_s: how long ranks may take to end after a first signal, seconds.
        port: of the store that ranks meet through; 0 takes a free one.
        num_threads: CPU threads a rank; 0: OMP_NUM_THREADS where set, else the cores divided by the ranks.
        preload: modules that a forked rank should find loaded.
        say: shows a message; on stderr where absent.

    Returns:
        0 good, 1 a check failed, 2 the request was wrong, 3 a rank failed; 128 and the signal's number where a signal
        ended the ranks before they could finish by themselves.

    Raises:
        LaunchError: the port cannot be used.
        OSError: the log folder cannot be written.
    """
    say = say or _say
    is_new = not log_dir.exists()
    log_dir.mkdir(parents=True, exist_ok=True)
    interrupts = Interrupts()
    with interrupts.caught(), tempfile.TemporaryDirectory(prefix="drumline-") as folder:
        method = "spawn" if device == "cuda" else "fork"
        if method == "fork":
            _load(preload)
        code = _Launch(entry, nproc, log_dir.absolute(), Path(folder), interrupts, say).run(
            method=method,
            max_restarts=max_restarts,
            timeout_s=timeout_s,
            grace_s=grace_s,
            port=port,
            num_threads=num_threads,
        )
    if code == REQUEST_WRONG and is_new:
        shutil.rmtree(log_dir, ignore_errors=True)  # nothing ran, so nothing is left behind
    return code


class _Launch:
    """One call of `launch_local`: the agent, and what is said about its ranks."""

    def __init__(
        self,
        entry: Callable[[], int | None],
        nproc: int,
        log_dir: Path,
        folder: Path,
        interrupts: Interrupts,
        say: Callable[[str], None],
    ):
        self._entry = entry
        self._nproc = nproc
        self._logs = {rank: log_dir / f"rank-{rank}.log" for rank in range(nproc)}
        self._folder = folder
        self._interrupts = interrupts
        self._say = say

    def run(
        self, *, method: str, max_restarts: int, timeout_s: float, grace_s: float, port: int, num_threads: int
    ) -> int:
        from torch.distributed.elastic.agent.server.api import WorkerSpec

        from drumline.comm.environment import read_num_threads
        from drumline.launch.agent import RankAgent
        from drumline.launch.console import Console
        from drumline.launch.rendezvous import LocalRendezvous

        num_threads = num_threads or read_num_threads() or max(1, _num_cores() // self._nproc)
        for log in self._logs.values():
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"---- {time.strftime('%Y-%m-%d %H:%M:%S')}: {self._nproc} ranks, {' '.join(sys.argv)}\n")
        # torch's agent logs what is said better here.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        console = Console(self._logs[0], self._folder)
        rendezvous = LocalRendezvous(port, timeout_s)
        try:
            agent = RankAgent(
                WorkerSpec(
                    role="train",
                    local_world_size=self._nproc,
                    rdzv_handler=rendezvous,
                    entrypoint="rank",  # a name for torch's events; the agent holds the callable
                    max_restarts=max_restarts,
                    monitor_interval=0.001,  # the agent waits for the ends of ranks itself
                ),
                entry=self._entry,
                method=method,
                variables={"OMP_NUM_THREADS": str(num_threads)},
                num_threads=num_threads,
                logs=self._logs,
                folder=self._folder,
                console=console,
                interrupts=self._interrupts,
                timeout_s=timeout_s,
                grace_s=grace_s,
                serve_store=rendezvous.serve,
                on_failure=self._report,
            )
            agent.run()
        finally:
            console.close()
        return self._judge(agent.exits, is_overdue=agent.is_overdue, grace_s=grace_s)

    def _report(self, exits: list[RankExit], attempt: int, is_restarted: bool) -> None:
        if self._was_ended_by_signal(exits):
            return
        self._say(describe(exits, self._logs))
        if is_restarted:
            self._say(f"starting all {self._nproc} ranks again (restart {attempt + 1})")

    def _judge(self, exits: dict[int, RankExit], *, is_overdue: bool, grace_s: float) -> int:
        number = self._interrupts.number
        ends = list(exits.values())
        if is_overdue and number is not None:
            reason = "a second signal came" if self._interrupts.is_urgent else f"they took longer than {grace_s:g} s"
            self._say(f"stopped: {signal_name(number)} came and {reason}; the run goes on from its last commit")
            return 128 + number
        if number is not None and self._was_ended_by_signal(ends):
            self._say(f"stopped by {signal_name(number)} before the ranks could answer it")
            return 128 + number
        if any(end.is_failure for end in ends):
            return exit_code(first_failure(ends))
        return 0

    def _was_ended_by_signal(self, exits: Sequence[RankExit]) -> bool:
        number = self._interrupts.number
        return number is not None and any(end.is_failure for end in exits) and -number == first_failure(exits).exit_code


def _load(modules: Sequence[str]) -> None:
    import torch

    from drumline.numerics.openmp import end_idle_threads

    torch.set_num_threads(1)
    for module in modules:
        importlib.import_module(module)
    end_idle_threads()  # a forked rank would wait for them


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _say(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
