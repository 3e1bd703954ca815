"""Rank 0's stderr, on the console and in its log at once.

The rank writes into a pipe, or into a terminal of its own where the console is one (so that a progress bar stays a
progress bar); a thread of the launcher copies what arrives. The log gets whole lines, without colour codes and without
the overwritten states of a progress bar.
"""

import contextlib
import os
import pty
import re
import select
import shutil
import termios
import threading
from pathlib import Path

_ESCAPES = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")


class LineFilter:
    """Turns what a terminal was sent into the lines that stay on it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """Takes the next bytes.

        Args:
            chunk: what was written.

        Returns:
            The lines that are now whole, plain.
        """
        *lines, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
        # A bar redraws after a carriage return and never ends its line; only its last state is kept.
        self._rest = self._rest[max(self._rest.rstrip(b"\r").rfind(b"\r"), 0) :]
        return b"".join(self._plain(line) + b"\n" for line in lines)

    def finish(self) -> bytes:
        """The last line, where it has no end."""
        rest, self._rest = self._plain(self._rest), b""
        return rest + b"\n" if rest else b""

    @staticmethod
    def _plain(line: bytes) -> bytes:
        return _ESCAPES.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])


class Console:
    """Copies a rank's stderr to the console and a log, while it is open.

    Args:
        log: the file to append to.
        folder: an existing private folder, for the pipe.
    """

    def __init__(self, log: Path, folder: Path):
        self._log = log
        self._is_terminal = os.isatty(2)
        if self._is_terminal:
            self._reader, self._writer = pty.openpty()
            self.path = Path(os.ttyname(self._writer))
            self._make_raw()
        else:
            self.path = folder / "stderr"
            os.mkfifo(self.path)
            self._reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
            self._writer = os.open(self.path, os.O_WRONLY)  # held, so that the pipe has no end between attempts
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to copy. Call it after the ranks are forked: a fork takes no threads along."""
        self._is_closing.clear()
        self._thread = threading.Thread(target=self._copy, name="console", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Copies what is still there, then stops; `start` may follow."""
        if self._thread is not None:
            self._is_closing.set()
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Stops and frees the pipe."""
        self.stop()
        os.close(self._reader)
        os.close(self._writer)

    def _copy(self) -> None:
        lines = LineFilter()
        with open(self._log, "ab", buffering=0) as log:
            while True:
                is_closing = self._is_closing.is_set()
                if not select.select([self._reader], [], [], 0 if is_closing else 0.05)[0]:
                    if is_closing:
                        break
                    continue
                with contextlib.suppress(BlockingIOError):
                    chunk = os.read(self._reader, 65536)
                    _write(chunk)
                    log.write(lines.feed(chunk))
            log.write(lines.finish())

    def _make_raw(self) -> None:
        """The console's own terminal turns newlines into line ends; ours must not do it a second time."""
        columns, rows = shutil.get_terminal_size()
        termios.tcsetwinsize(self._writer, (rows, columns))
        attributes = termios.tcgetattr(self._writer)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(self._writer, termios.TCSANOW, attributes)


def _write(chunk: bytes) -> None:
    with contextlib.suppress(OSError):  # a console that has gone away must not stop the run
        while chunk:
            chunk = chunk[os.write(2, chunk) :]
