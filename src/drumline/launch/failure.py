"""Which rank failed first, and how to say it in one message.

When a rank dies its peers soon fail too: their collectives lose the connection. The cause is the earliest failure that
is not itself the loss of a peer; the rest is said in one line after it.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHECK_FAILED, REQUEST_WRONG, DRUMLINE_FAILED = 1, 2, 3

# What gloo, NCCL and the store say when the process at the other end has gone.
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote (process|peer)|peer (closed|lost)|socket closed"
    r"|no route to host|failed to recv|sendBytes failed|recvValue failed|ncclRemoteError",
    re.IGNORECASE,
)

# What they say when that process is there and does not answer.
_PEER_SILENT = re.compile(r"timed out waiting|collective operation timeout|wait timeout", re.IGNORECASE)


@dataclass(frozen=True)
class Report:
    """What a rank wrote about its own failure before it ended.

    Attributes:
        kind: the exception's type.
        message: its text.
        where: file, line and function that raised it.
        time_s: when, on the machine's monotonic clock, seconds.
        is_request_error: it derives from `DrumlineError`: the user can mend it.
    """

    kind: str
    message: str
    where: str
    time_s: float
    is_request_error: bool


@dataclass(frozen=True)
class RankExit:
    """How a rank ended.

    Attributes:
        rank: its global rank.
        exit_code: of the process; negative: the signal that killed it.
        time_s: when its end was seen, on the machine's monotonic clock, seconds.
        report: its own account, where it gave one.
        is_stopped: the launcher killed it, because another rank had failed or it did not answer.
        note: why the launcher holds it for a failure, where the process itself gave no reason.
    """

    rank: int
    exit_code: int
    time_s: float
    report: Report | None = None
    is_stopped: bool = False
    note: str = ""

    @property
    def is_failure(self) -> bool:
        """It failed by itself."""
        return self.exit_code != 0 and not self.is_stopped


def first_failure(exits: Sequence[RankExit]) -> RankExit:
    """The failure that caused the others.

    Args:
        exits: how the ranks ended, at least one a failure.

    Returns:
        The earliest failure that is not the loss of a peer; the earliest at all where every one is.
    """
    return min(
        (end for end in exits if end.is_failure),
        key=lambda end: (_is_loss_of_peer(end), end.report.time_s if end.report else end.time_s),
    )


def exit_code(end: RankExit) -> int:
    """The launcher's exit code for a rank's end.

    Args:
        end: how the rank ended.

    Returns:
        0 good, 1 a check failed, 2 the request was wrong, 3 drumline failed (any other code, and any signal).
    """
    return end.exit_code if end.exit_code in (0, CHECK_FAILED, REQUEST_WRONG) else DRUMLINE_FAILED


def describe(exits: Sequence[RankExit], logs: dict[int, Path]) -> str:
    """One message about all that failed, the cause first.

    Args:
        exits: how the ranks ended, at least one a failure.
        logs: the log file of each rank.

    Returns:
        The lines to show.
    """
    first = first_failure(exits)
    report = first.report
    if report is not None and report.is_request_error:
        said_by = [end.rank for end in exits if end.report and end.report.message == report.message]
        return report.message if 0 in said_by else f"rank {first.rank}: {report.message}"
    others = _others([end for end in exits if end is not first])
    silent = [end.rank for end in exits if end.is_stopped]
    if report is not None and silent and _PEER_SILENT.search(report.message):
        # That rank did nothing wrong but wait; whom it waited for is among those that were still at work.
        whom, log = ("it", logs[silent[0]]) if len(silent) == 1 else ("one of them", logs[silent[0]].parent)
        return (
            f"{_ranks(silent)} did not answer: rank {first.rank} waited for {whom} longer than it may "
            f"(resilience.timeout_s)\n  log: {log} (with the stack, where a rank could still write it)\n"
            f"  rank {first.rank}: {_account(first)}"
        )
    lines = [f"rank {first.rank} failed first: {_account(first)}", f"  log: {logs[first.rank]}"]
    return "\n".join([*lines, *([f"  after it: {others}"] if others else [])])


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 99` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _account(end: RankExit) -> str:
    if end.note:
        return end.note
    if end.report is not None:
        text = end.report.message.strip()
        return f"{end.report.kind}{f': {text}' if text else ''} (exit code {end.exit_code}, at {end.report.where})"
    if end.exit_code < 0:
        hint = "; Linux kills a process so when memory runs out" if -end.exit_code == signal.SIGKILL else ""
        return f"killed by {signal_name(-end.exit_code)}{hint}"
    return f"it ended with exit code {end.exit_code}"


def _others(exits: Sequence[RankExit]) -> str:
    lost = [end.rank for end in exits if end.is_failure and _is_loss_of_peer(end)]
    stopped = [end.rank for end in exits if end.is_stopped]
    parts = []
    if lost:
        parts.append(f"{_ranks(lost)} lost the connection to it")
    if stopped:
        parts.append(f"{_ranks(stopped)} still ran and had to be stopped (the log has the stack)")
    for end in exits:
        if end.is_failure and not _is_loss_of_peer(end):
            parts.append(f"rank {end.rank}: {_account(end).splitlines()[0]}")
    return "; ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 2-7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _is_loss_of_peer(end: RankExit) -> bool:
    return end.report is not None and bool(_PEER_LOST.search(end.report.message))
