"""How commands print: aligned tables for people, one JSON document for programs."""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from drumline.cli.environment import terminal

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def print_json(document: Any) -> None:
    """Prints one JSON document on stdout, and nothing else.

    Args:
        document: dicts, lists and plain values; a number that JSON does not have is written as text.
    """
    sys.stdout.write(json.dumps(_plain(document), indent=2, allow_nan=False, default=str) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[str] = ()) -> None:
    """Prints a table on stdout, its columns aligned by spaces.

    Args:
        columns: the headings.
        rows: the cells.
        numeric: headings of the columns that are aligned to the right.
    """
    rows = [list(row) for row in rows]
    widths = [max(len(row[index]) for row in [list(columns), *rows]) for index in range(len(columns))]
    is_right = [column in numeric for column in columns]
    bold, plain = (_BOLD, _PLAIN) if terminal(sys.stdout).has_color else ("", "")
    for number, row in enumerate([columns, *rows]):
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_right, strict=True)
        )
        line = "  ".join(cells).rstrip()
        sys.stdout.write(f"{bold}{line}{plain}\n" if number == 0 else f"{line}\n")
