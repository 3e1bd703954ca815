"""A problem: one thing that is wrong with a recipe, said so that it can be mended.

A problem reads its value through its key, so that a message cannot name the wrong one:

    layout.tp = 6 does not divide model.num_kv_heads = 8   [layout-tp-kv-heads]
      nearest that work: 4, 8      try: layout.tp=4
"""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT: Any = _Absent()
"""The value of a key that has none, because it is missing."""

UNKNOWN_KEY = "unknown-key"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        code: stable name of the rule, such as `layout-tp-kv-heads`; for programs and for searching the docs.
        key: dotted key of the value that is wrong; empty when the problem is with a whole file.
        value: the value as it was given.
        rule: what is wrong, as the rest of the sentence that starts with `key = value`.
        nearest: values of `key` that work, nearest first (for an unknown key: keys); empty when none is known.
        remedy: an override that mends it, such as `layout.tp=4`; empty when none is known.
    """

    code: str
    key: str
    value: Any
    rule: str
    nearest: tuple[Any, ...] = ()
    remedy: str = ""

    def __str__(self) -> str:
        """The problem as one or two lines."""
        value = "" if self.value is ABSENT else f" = {show(self.value)}"
        lines = [f"{self.key}{value} {self.rule}   [{self.code}]" if self.key else f"{self.rule}   [{self.code}]"]
        hints = []
        if self.nearest:
            label = "did you mean" if self.code == UNKNOWN_KEY else "nearest that work"
            shown = (str(value) if self.code == UNKNOWN_KEY else show(value) for value in self.nearest)
            hints.append(f"{label}: {', '.join(shown)}")
        if self.remedy:
            hints.append(f"try: {shlex.quote(self.remedy)}")
        if hints:
            lines.append("  " + "      ".join(hints))
        return "\n".join(lines)


def problem(recipe: Any, code: str, key: str, rule: str, nearest: Sequence[Any] = (), remedy: str = "") -> Problem:
    """Builds a problem whose value is read from the recipe through its key.

    Args:
        recipe: the recipe, or any object in which the dotted `key` can be followed.
        code: stable name of the rule.
        key: dotted key; a numeric part indexes a tuple.
        rule: the rest of the sentence that starts with `key = value`.
        nearest: values of `key` that work, nearest first.
        remedy: an override that mends it; by default the key with the first of `nearest`.

    Returns:
        The problem.
    """
    value = recipe
    for part in key.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    if nearest and not remedy:
        remedy = override(key, nearest[0])
    return Problem(code, key, value, rule, tuple(nearest), remedy)


def override(key: str, value: Any) -> str:
    """`key=value` as a word of a command line."""
    return f"{key}={value if isinstance(value, str) else show(value)}"


def show(value: Any) -> str:
    """A value as TOML would write it, shortened to fit a line."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(show(element) for element in value[:10])}]"
    elif isinstance(value, dict):
        text = f"{{ {', '.join(f'{name} = {show(inner)}' for name, inner in list(value.items())[:10])} }}"
    elif value is None:
        text = "none"
    elif isinstance(value, str):
        text = json.dumps(value)
    elif isinstance(value, int) and value.bit_length() > 1024:  # Python refuses to print more than 4,300 digits
        text = f"an integer of {value.bit_length()} bits"
    elif isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 1e16:
        text = f"{value:.1f}"
    else:
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
