"""Signals to the launcher: the first asks the ranks to finish their step, the second ends them at once."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """The signals that came, for the agent to act on between two looks at its ranks."""

    def __init__(self) -> None:
        self.number: int | None = None  # the first signal that came
        self.is_urgent = False  # a second one came
        self._came_s = 0.0
        self._is_new = False

    def note(self, number: int, _frame: Any = None) -> None:
        """A signal came.

        Args:
            number: which.
        """
        if self.number is not None:
            self.is_urgent = True
            return
        self.number, self._is_new, self._came_s = number, True, time.monotonic()

    def take(self) -> int | None:
        """The signal to forward, once; None where there is none."""
        if not self._is_new:
            return None
        self._is_new = False
        return self.number

    def seconds_since(self) -> float:
        """How long ago the first signal came, seconds; 0 where none came."""
        return time.monotonic() - self._came_s if self.number is not None else 0.0

    def restart_clock(self) -> None:
        """New ranks have been started: a signal that came before must reach them too."""
        if self.number is not None:
            self._is_new, self._came_s = True, time.monotonic()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Notes signals instead of dying of them."""
        previous = {number: signal.signal(number, self.note) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
