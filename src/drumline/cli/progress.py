"""A progress bar with rate and time left on a terminal; elsewhere a line to stderr now and then."""

import sys
import time
from types import TracebackType

from drumline.cli.environment import terminal

LINE_EVERY_S = 15.0


class Meter:
    """Shows how far a command is, on stderr.

    Args:
        verb: what is being done, until `show` says.
        noun: what the bytes are of.
    """

    def __init__(self, verb: str, noun: str):
        self.seconds = 0.0
        self._noun = noun
        self._verb = verb
        self._began = self._last_line = time.monotonic()
        self._bar = None
        self._task = None

    def __enter__(self) -> "Meter":
        """Starts the clock and, on a terminal, the bar."""
        self._began = self._last_line = time.monotonic()
        look = terminal(sys.stderr)
        if look.is_tty:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[told]}"),
                console=Console(stderr=True, no_color=not look.has_color),
                transient=True,
            )
            self._task = self._bar.add_task(self._verb, total=None, told="")
            self._bar.start()
        return self

    def show(self, stage: str, done_bytes: int, total_bytes: int | None, told: str = "") -> None:
        """Shows a new position.

        Args:
            stage: what is being done.
            done_bytes: bytes done.
            total_bytes: bytes in all; None where nobody knows.
            told: what else there is to say.
        """
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=stage, completed=done_bytes, total=total_bytes, told=told)
            return
        now = time.monotonic()
        if now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            sys.stderr.write(self._line(stage, done_bytes, total_bytes, told, now - self._began))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the bar away and stops the clock."""
        self.seconds = time.monotonic() - self._began
        if self._bar is not None:
            self._bar.stop()

    def _line(self, stage: str, done_bytes: int, total_bytes: int | None, told: str, elapsed_s: float) -> str:
        rate = done_bytes / elapsed_s
        left = f", {(total_bytes - done_bytes) / rate:.0f} s left" if total_bytes and rate else ""
        of_all = f" of {total_bytes / 1e6:,.0f}" if total_bytes else ""
        return f"{stage}: {done_bytes / 1e6:,.0f}{of_all} MB of {self._noun}, {rate / 1e6:.1f} MB/s{left}  {told}\n"
