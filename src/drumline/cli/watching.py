"""How far a verification is, on stderr: a bar on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

from drumline.cli.environment import terminal

LINE_EVERY_S = 15.0


class Judged(Protocol):
    """What became of a layout."""

    @property
    def ok(self) -> bool: ...


T = TypeVar("T", bound=Judged)


def watched(results: Iterable[T], total: int) -> Iterator[T]:
    """Passes results on, and shows how far they are.

    Args:
        results: as they come.
        total: how many there will be.

    Yields:
        The results.
    """
    look, began, last, wrong = terminal(sys.stderr), time.monotonic(), time.monotonic(), 0
    bar: Any = None
    task: Any = None
    if look.is_tty:
        from rich.console import Console
        from rich.progress import Progress

        bar = Progress(console=Console(stderr=True, no_color=not look.has_color), transient=True)
        bar.start()
        task = bar.add_task("layouts", total=total)
    try:
        for done, result in enumerate(results, start=1):
            wrong += not result.ok
            if bar is not None:
                bar.update(task, completed=done, description=f"layouts, {wrong} wrong" if wrong else "layouts")
            elif time.monotonic() - last >= LINE_EVERY_S:
                last = time.monotonic()
                left = (last - began) / done * (total - done)
                sys.stderr.write(f"{done} of {total} layouts, {wrong} wrong, about {left:.0f} s left\n")
            yield result
    finally:
        if bar is not None:
            bar.stop()
