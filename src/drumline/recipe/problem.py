"""A problem: one thing that is wrong with a recipe, said so that it can be mended.

A problem reads its value through its key, so that a message cannot name the wrong one:

    layout.tp = 6 does not divide model.num_kv_heads = 8   [layout-tp-kv-heads]
      nearest that work: 4, 8      try: drumline train llama3-8b layout.tp=4
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        code: stable name of the rule, such as `layout-tp-kv-heads`; for programs and for searching the docs.
        key: dotted key of the value that is wrong; empty when the problem is with a whole file.
        value: the value as it was given.
        rule: what is wrong, as the rest of the sentence that starts with `key = value`.
        nearest: values of `key` that work, nearest first; empty when none is known.
        remedy: overrides that mend it, such as `layout.tp=4`; empty when none is known.
    """

    code: str
    key: str
    value: Any
    rule: str
    nearest: tuple[Any, ...] = ()
    remedy: str = field(default="")

    def render(self, command: str = "") -> str:
        """The problem as one or two lines.

        Args:
            command: what the user typed up to the overrides; the line to try starts with it.

        Returns:
            The message.
        """
        subject = (
            f"{self.key} = {show(self.value)} "
            if self.key and self.value is not ABSENT
            else self.key and f"{self.key} "
        )
        lines = [f"{subject}{self.rule}   [{self.code}]"]
        hints = []
        if self.nearest:
            hints.append(f"nearest that work: {', '.join(show(value) for value in self.nearest)}")
        if self.remedy:
            hints.append(f"try: {command} {self.remedy}" if command else f"try: {self.remedy}")
        if hints:
            lines.append("  " + "      ".join(hints))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


class _Absent:
    """The value of a key that has none: unknown, or missing."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def problem(recipe: Any, code: str, key: str, rule: str, nearest: Sequence[Any] = (), remedy: str = "") -> Problem:
    """Builds a problem whose value is read from the recipe through its key.

    Args:
        recipe: the recipe, or any object in which the dotted `key` can be followed.
        code: stable name of the rule.
        key: dotted key; a numeric part indexes a tuple.
        rule: the rest of the sentence that starts with `key = value`.
        nearest: values of `key` that work, nearest first.
        remedy: overrides that mend it; by default the first of `nearest`.

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
    """`key=value` as it is typed in a shell: quoted where the shell would take it apart."""
    text = f"{key}={value if isinstance(value, str) else show(value)}"
    safe = all(letter.isalnum() or letter in "=._-:/+,@%" for letter in text)
    return text if safe and text.isascii() else "'" + text.replace("'", "'\\''") + "'"


def show(value: Any) -> str:
    """A value as TOML would write it, shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None:
        return "none"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=True)
    elif isinstance(value, int | float):
        try:
            text = repr(value)
        except ValueError:  # an integer of more than 4,300 digits cannot be written in decimal
            text = "an integer of more than 4300 digits"
    else:
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
