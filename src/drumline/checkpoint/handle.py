"""A save under way: what the caller of `Saver.save` holds."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from drumline.checkpoint.errors import SaveError


class CommitHandle:
    """A save under way, or done.

    Args:
        path: where the commit will be.
        step: of the commit.

    Attributes:
        num_bytes: of the commit's logical tensors, once it is made; 0 before, and on ranks other than 0, which see no
            more than their own part.
        stall_s: how long `Saver.save` took, seconds.
        duration_s: from then until the commit was durable, seconds.
    """

    def __init__(self, path: Path, step: int):
        self.path = path
        self.step = step
        self.num_bytes = 0
        self.stall_s = 0.0
        self.duration_s = 0.0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._was_raised = False

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why there is no commit; None while it is under way, and when it is made."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> Path:
        """Waits until the commit is made and durable.

        Args:
            timeout_s: longest wait, seconds; None: as long as the saver allows.

        Returns:
            The commit's folder.

        Raises:
            SaveError: there is no such commit, or not yet.
        """
        if not self.settle(timeout_s):
            raise SaveError(f"step {self.step} is still being written after {timeout_s:g} s")
        if self._error is not None:
            self._was_raised = True
            raise self._error
        return self.path

    def settle(self, timeout_s: float | None = None) -> bool:
        """Waits until it is over, well or not.

        Args:
            timeout_s: longest wait, seconds; None: as long as the saver allows.

        Returns:
            Whether it is over.
        """
        if not self._done.wait(timeout_s):
            return False
        # Only a moment more: a daemon that is still unwinding when the interpreter ends can abort the process.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        return True

    def raise_unseen(self) -> None:
        """Raises the error of a save that is over, if nobody has seen it yet.

        Raises:
            SaveError: there is no such commit.
        """
        if self._error is not None and not self._was_raised:
            self.wait()

    def run(self, write: Callable[[], int]) -> None:
        """Starts the save in a thread of its own.

        Args:
            write: makes the commit and gives its size as this rank knows it, or raises.
        """
        # A daemon: when the run dies of something else, a save that waits for a dead rank must not keep the process.
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"save-{self.step}", daemon=True)
        self._thread.start()

    def _run(self, write: Callable[[], int]) -> None:
        began = time.perf_counter()
        try:
            self.num_bytes = write()
        except BaseException as error:
            self._error = error
        self.duration_s = time.perf_counter() - began
        self._done.set()
