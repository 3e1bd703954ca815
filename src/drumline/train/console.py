"""What a person sees on rank 0: one line a step, and on a terminal a progress bar with the time left."""

import math
from contextlib import ExitStack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from drumline.train.records import (
    CommitRecord,
    EndRecord,
    Record,
    ReplayRecord,
    RouterRecord,
    StartRecord,
    StepRecord,
    ValidationRecord,
)


class ConsoleView:
    """Prints records for a person.

    Args:
        console: where to.
        log_every: steps between lines; the first and the last step always have one.
    """

    def __init__(self, console: Console, log_every: int):
        self._console = console
        self._log_every = log_every
        self._num_steps = 0
        self._stack = ExitStack()
        self._progress: Progress | None = None
        self._task = None

    def observe(self, record: Record) -> None:
        """Prints one record."""
        match record:
            case StartRecord():
                self._num_steps = record.num_steps
                self._say(start_line(record))
                if self._console.is_terminal:
                    self._open_bar(record)
            case StepRecord():
                if self._progress is not None and self._task is not None:
                    self._progress.update(self._task, completed=record.step)
                if record.step % self._log_every == 0 or record.step in (1, self._num_steps):
                    self._say(step_line(record, self._num_steps))
            case ValidationRecord():
                perplexity = math.exp(record.loss) if record.loss < 700 else math.inf
                self._say(f"validation at step {record.step}: loss {record.loss:.4f}  perplexity {perplexity:,.1f}")
            case CommitRecord():
                size = show_bytes(record.num_bytes)
                self._say(f"commit at step {record.step}: {size}, waited {record.stall_s * 1e3:.0f} ms")
            case ReplayRecord():
                same = f"{record.num_digests:,} digests the same ({record.replay_s:.2f} s)"
                self._say(f"step {record.step}: a micro-batch computed twice, {same}")
            case EndRecord():
                self._say(end_line(record, self._num_steps))

    def close(self) -> None:
        """Takes the bar down."""
        self._stack.close()

    def _open_bar(self, record: StartRecord) -> None:
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("ETA"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
        self._stack.enter_context(self._progress)
        self._task = self._progress.add_task("training", total=record.num_steps, completed=record.step)

    def _say(self, line: str) -> None:
        say(self._console, line)


def say(console: Console, line: str) -> None:
    """Prints a line as it is: paths are not coloured, brackets are not markup, nothing is wrapped."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def start_line(record: StartRecord) -> str:
    """How the run starts: layout, attention, peak, and from where."""
    peak = f"{record.peak_flops / 1e12:,.2f} TFLOP/s peak" if record.peak_flops else "no peak known: no MFU"
    source = f"resumed from {record.resumed_from}" if record.resumed_from else "from the start"
    ranks = f"{record.world} rank{'s' * (record.world > 1)}"
    return (
        f"layout {record.layout} on {ranks}, {record.attention}, {peak}\n"
        f"steps {record.step + 1} to {record.num_steps}, {source}"
    )


def step_line(record: StepRecord, num_steps: int) -> str:
    """One step on one line."""
    mfu = f"  mfu {record.mfu:6.1%}" if record.mfu is not None else ""
    mtp = f"  mtp loss {record.mtp_loss:.4f}" if record.mtp_loss is not None else ""
    number = f"{record.step:>{len(str(num_steps))}}/{num_steps}"
    return (
        f"step {number}  loss {record.loss:.4f}{mtp}  grad norm {record.grad_norm:.3f}  "
        f"lr {record.lr:.2e}  {record.tokens_per_s:>9,.0f} tokens/s{mfu}  memory {show_bytes(record.memory_bytes)}"
        f"{_router(record.router)}"
    )


def _router(router: RouterRecord | None) -> str:
    """The least and the most chosen expert of any layer, over the mean, and what was dropped."""
    if router is None:
        return ""
    dropped = sum(router.dropped) / len(router.dropped)
    share = f"  dropped {dropped:.1%}" if dropped else ""
    return f"  expert load {min(router.load_min):.2f} to {max(router.load_max):.2f}{share}"


def end_line(record: EndRecord, num_steps: int) -> str:
    """How the run ended."""
    if record.reason == "preempted":
        return f"stopped after step {record.step} of {num_steps}, committed; the same command goes on from here"
    return f"{record.reason} after step {record.step} of {num_steps}"


def show_bytes(num_bytes: float) -> str:
    """Bytes in the unit that reads best, e.g. `1.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
