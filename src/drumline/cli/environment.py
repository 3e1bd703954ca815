"""What the command line reads from the process's environment, in one place.

Source: https://no-color.org for NO_COLOR.
"""

import os
import sys
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Terminal:
    """How output may look.

    Attributes:
        is_tty: a person reads it at a terminal.
        has_color: colour is welcome.
    """

    is_tty: bool
    has_color: bool


def calm_threads() -> None:
    """Lets OpenMP's idle threads sleep instead of spin, unless the user says otherwise; before torch is loaded.

    Ranks that share cores otherwise burn one another's time: one run was 13 times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def terminal(stream: TextIO | None = None) -> Terminal:
    """How output on a stream may look: colour only on a terminal, and never where NO_COLOR is set or TERM is dumb.

    Args:
        stream: where the output goes; standard output by default.

    Returns:
        What the stream can show.
    """
    shown: TextIO = sys.stdout if stream is None else stream
    is_tty = shown.isatty()
    return Terminal(
        is_tty, has_color=is_tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb")
    )
