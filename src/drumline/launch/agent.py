"""The elastic agent of one machine: starts a process a rank, watches all, and starts them again where that is allowed.

torch's `SimpleElasticAgent` keeps the loop of rendezvous, start, watch and restart; this class says how processes are
started and judged. A rank is forked from the launcher, which has torch loaded (0.1 s for four ranks instead of 9 s), or
spawned where the parent may hold a CUDA context.
"""

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from drumline.launch.console import Console
from drumline.launch.failure import CHECK_FAILED, REQUEST_WRONG, RankExit, first_failure
from drumline.launch.interrupt import Interrupts
from drumline.launch.rank import FORWARDED, STACK_SIGNAL, RankSpec, read_report, run_rank

SETTLE_S = 1.0  # after a failure, peers get this long to fail by themselves, so that their accounts are known
STACK_S = 0.3  # a rank that is stopped gets this long to write its stack


class RankAgent(SimpleElasticAgent):
    """Runs `entry` on every local rank.

    Args:
        spec: the number of ranks, the rendezvous, the restarts.
        entry: runs one rank, see `run_rank`.
        method: how processes start, `fork` or `spawn`.
        variables: environment of every rank, beside its place.
        num_threads: CPU threads a rank.
        logs: the log file of each rank.
        folder: an existing private folder, for accounts of failures.
        console: copies rank 0's stderr.
        interrupts: the signals that the launcher has got.
        timeout_s: how long ranks may go on after one of them has finished, seconds.
        grace_s: how long ranks may take to commit and end after a signal, seconds.
        serve_store: called once the ranks have been started; opens the store that they meet through.
        on_failure: called with all exits and the number of the attempt, before a restart or the end.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        entry: Callable[[], int | None],
        method: str,
        variables: dict[str, str],
        num_threads: int,
        logs: dict[int, Path],
        folder: Path,
        console: Console,
        interrupts: Interrupts,
        timeout_s: float,
        grace_s: float,
        serve_store: Callable[[], None],
        on_failure: Callable[[list[RankExit], int, bool], None],
    ):
        super().__init__(spec)
        self._entry = entry
        self._method = method
        self._variables = variables
        self._num_threads = num_threads
        self._logs = logs
        self._folder = folder
        self._console = console
        self._interrupts = interrupts
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._serve_store = serve_store
        self._on_failure = on_failure
        self._processes: dict[int, BaseProcess] = {}
        self.exits: dict[int, RankExit] = {}
        self.is_overdue = False  # ranks were killed because they did not end within the grace after a signal

    @property
    def attempt(self) -> int:
        """0 at first, and one more with each restart."""
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        context: Any = multiprocessing.get_context(self._method)
        self._processes, self.exits = {}, {}
        # A signal that comes between the fork and the child's own handlers waits until they are set.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            for worker in worker_group.workers:
                spec = self._rank_spec(worker_group, worker)
                spec.report.unlink(missing_ok=True)
                process = context.Process(target=run_rank, args=(self._entry, spec), name=f"rank-{worker.global_rank}")
                with warnings.catch_warnings():
                    # Newer Pythons warn of a fork beside any thread, such as the idle ones of a BLAS.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                self._processes[worker.global_rank] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._serve_store()
        self._console.start()
        self._interrupts.restart_clock()
        return {worker.local_rank: self._processes[worker.global_rank].pid for worker in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._collect(wait_s=0.05)
        self._obey_signals()
        if any(end.is_failure for end in self.exits.values()):
            return self._fail(worker_group)
        if len(self.exits) == len(self._processes):
            return self._succeed()
        self._hurry_stragglers()
        return RunResult(WorkerState.HEALTHY)

    # `*args`: newer torch says whether a restart follows.
    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        self._kill()
        self._console.stop()

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self._kill()
        self._console.stop()

    def _rank_spec(self, group: WorkerGroup, worker: Any) -> RankSpec:
        rank = worker.global_rank
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
            "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(group.spec.rdzv_handler.use_agent_store),
        }
        return RankSpec(
            variables={**self._variables, **variables},
            num_threads=self._num_threads,
            log=self._logs[rank],
            stderr=self._console.path if rank == 0 else self._logs[rank],
            report=self._report(rank),
            launcher=os.getpid(),
        )

    def _report(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.json"

    def _collect(self, wait_s: float, *, is_stopped: bool = False, note: str = "") -> None:
        """Notes the ranks that have ended, waiting at most so long for the next one."""
        running = {process.sentinel: rank for rank, process in self._processes.items() if rank not in self.exits}
        for sentinel in wait(list(running), timeout=wait_s) if running else ():
            rank = running[sentinel]  # type: ignore[index]
            process = self._processes[rank]
            process.join()
            code = process.exitcode if process.exitcode is not None else 1
            report = read_report(self._report(rank)) if code else None
            self.exits[rank] = RankExit(rank, code, time.monotonic(), report, is_stopped, note)

    def _collect_until(self, deadline_s: float, *, is_stopped: bool = False, note: str = "") -> None:
        while len(self.exits) < len(self._processes) and (left_s := deadline_s - time.monotonic()) > 0:
            self._collect(left_s, is_stopped=is_stopped, note=note)

    def _succeed(self) -> RunResult:
        self._console.stop()
        return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(self.exits, 0))

    def _fail(self, worker_group: WorkerGroup) -> RunResult:
        self._collect_until(time.monotonic() + SETTLE_S)
        self._kill()
        self._console.stop()
        first = first_failure(list(self.exits.values()))
        # The same request would be as wrong a second time, and a run that was asked to stop must not begin again.
        if first.exit_code in (CHECK_FAILED, REQUEST_WRONG) or self._interrupts.number is not None:
            self._remaining_restarts = 0
        self._on_failure(list(self.exits.values()), self.attempt, self._remaining_restarts > 0)
        local = next(worker.local_rank for worker in worker_group.workers if worker.global_rank == first.rank)
        pid = self._processes[first.rank].pid or 0
        failure = ProcessFailure(local_rank=local, pid=pid, exitcode=first.exit_code, error_file="")
        return RunResult(WorkerState.FAILED, failures={first.rank: failure})

    def _obey_signals(self) -> None:
        """Asks every rank once to finish its step and end; kills on a second signal, or when the grace is over."""
        number = self._interrupts.take()
        if number is not None:
            self._signal_running(number)
        elif self._interrupts.is_urgent or self._interrupts.seconds_since() > self._grace_s:
            self.is_overdue = len(self.exits) < len(self._processes)
            self._kill()

    def _hurry_stragglers(self) -> None:
        if not self.exits or self._interrupts.number is not None:
            return
        finished_s = min(end.time_s for end in self.exits.values())
        if time.monotonic() - finished_s > self._timeout_s:
            late = f"it did not end within {self._timeout_s:g} s of the first rank that finished"
            self._end_all(note=f"{late}; its log has the stack")

    def _kill(self) -> None:
        if len(self.exits) < len(self._processes):
            self._end_all(is_stopped=True)

    def _end_all(self, *, is_stopped: bool = False, note: str = "") -> None:
        """Lets the ranks that still run write their stacks, then kills them; who asked twice waits for no stacks."""
        if not self._interrupts.is_urgent:
            self._signal_running(STACK_SIGNAL)
            time.sleep(STACK_S)
            self._collect(0.0)
        self._signal_running(signal.SIGKILL)
        self._collect_until(time.monotonic() + 10.0, is_stopped=is_stopped, note=note)

    def _signal_running(self, number: int) -> None:
        for rank, process in self._processes.items():
            # `exitcode` reaps an ended child, so a process id that is still ours cannot be another process's yet.
            if rank not in self.exits and process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)
