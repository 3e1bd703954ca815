"""A polite stop: SIGTERM (preemption) and Ctrl-C let the step finish and the run commit; a second one ends it at
once.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StopRequest:
    """Whether this rank was asked to stop; the ranks agree on it at the next step's start."""

    def __init__(self):
        self.name: str | None = None

    @property
    def is_set(self) -> bool:
        return self.name is not None

    def handle(self, number: int, frame: object) -> None:
        """The signal handler.

        Args:
            number: of the signal.
            frame: what it interrupted.

        Raises:
            KeyboardInterrupt: the second time; the last commit stays whole.
        """
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name


@contextmanager
def end_at_once() -> Iterator[None]:
    """Lets SIGTERM and SIGINT end the process as the system does: for waits inside torch, where no Python handler is
    called.
    """
    with _handled_by(signal.SIG_DFL):
        yield


@contextmanager
def listen() -> Iterator[StopRequest]:
    """Listens to SIGTERM and SIGINT for the length of a block, then restores what was there."""
    request = StopRequest()
    with _handled_by(request.handle):
        yield request


@contextmanager
def _handled_by(new: Callable[[int, object], None] | signal.Handlers) -> Iterator[None]:
    previous = {number: signal.signal(number, new) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
