"""What happens inside a rank's process: it takes its place, runs its entry, and leaves an account if it fails.

The process was forked (or spawned) by the launcher. It leads a session of its own, so that Ctrl-C at the terminal
reaches the launcher alone, which then asks each rank once; and it dies with the launcher, so that no rank outlives it
and writes on.
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from drumline.launch.failure import CHECK_FAILED, DRUMLINE_FAILED, REQUEST_WRONG, Report
from drumline.recipe.errors import CheckFailed, DrumlineError

STACK_SIGNAL = signal.SIGUSR2  # the launcher sends it to a rank that does not answer, before it kills
FORWARDED = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankSpec:
    """All that a rank's process needs from the launcher.

    Attributes:
        variables: the environment to set: RANK, WORLD_SIZE and so on.
        num_threads: CPU threads to compute with.
        log: the file that gets stderr, and stdout too except on rank 0.
        stderr: where stderr goes: the log, or a pipe or terminal whose other end the launcher copies to log and
            console.
        report: where to leave the account of a failure.
        launcher: process id of the launcher.
    """

    variables: Mapping[str, str]
    num_threads: int
    log: Path
    stderr: Path
    report: Path
    launcher: int


def run_rank(entry: Callable[[], int | None], spec: RankSpec) -> None:
    """Runs one rank in this process and ends it with the rank's exit code.

    Args:
        entry: runs the rank; returns an exit code, None meaning 0. What it raises becomes the exit code: 1 for
            `CheckFailed`, 2 for any other `DrumlineError`, 3 for anything else. It should not print what it raises: the
            launcher does, once.
        spec: the place to take.
    """
    _die_with(spec.launcher)
    _take_streams(spec)
    _reset_signals()
    try:
        _take_place(spec)
        code = entry() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else DRUMLINE_FAILED
    except BaseException as error:
        code = _leave_account(error, spec)
        _flush()
        os._exit(code)  # at once: threads that wait for a peer would keep the process, and with it the other ranks
    _flush()
    sys.exit(code)


def read_report(path: Path) -> Report | None:
    """The account that a rank left.

    Args:
        path: `RankSpec.report`.

    Returns:
        The account; None where there is none, or only a part of one.
    """
    try:
        return Report(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _die_with(launcher: int) -> None:
    if sys.platform != "linux":
        return
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the request took hold
        os._exit(DRUMLINE_FAILED)


def _take_streams(spec: RankSpec) -> None:
    _flush()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY
    stderr = os.open(spec.stderr, flags, 0o644)
    os.dup2(stderr, 2)
    if spec.variables["RANK"] != "0":
        os.dup2(stderr, 1)
    os.close(stderr)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if spec.variables["RANK"] != "0":
        sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    faulthandler.register(STACK_SIGNAL, sys.stderr, all_threads=True)


def _reset_signals() -> None:
    """A signal ends the rank until its entry sets handlers; those of the launcher came along with the fork."""
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _take_place(spec: RankSpec) -> None:
    import torch

    from drumline.comm.environment import export

    export(spec.variables)
    # A forked child's OpenMP has read its environment already, in the launcher.
    torch.set_num_threads(spec.num_threads)


def _leave_account(error: BaseException, spec: RankSpec) -> int:
    now = time.monotonic()
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "an unknown place"
    account = Report(type(error).__name__, str(error), where, now, isinstance(error, DrumlineError))
    part = spec.report.with_suffix(".part")
    part.write_text(json.dumps(asdict(account)), encoding="utf-8")
    part.rename(spec.report)
    with open(spec.log, "a", encoding="utf-8", errors="backslashreplace") as log:
        log.write("".join(traceback.format_exception(error)))
    if isinstance(error, CheckFailed):
        return CHECK_FAILED
    return REQUEST_WRONG if isinstance(error, DrumlineError) else DRUMLINE_FAILED


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a reader that has gone away, or a closed stream: nothing is owed to it
            continue
