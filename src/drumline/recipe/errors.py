"""The exceptions that a user can cause, and how they end a command.

    Exception
    +-- DrumlineError        the request cannot be met: exit code 2
        +-- RecipeError      a recipe has problems, all of them listed
        +-- CheckFailed      a check ran and its answer is no: exit code 1

A room that needs its own kind derives it from `DrumlineError` (or from `CheckFailed`) in its own folder. Anything else
that escapes is a fault of drumline itself: exit code 3. A message says what is wrong, where, and what would work.
"""

import shlex
from collections.abc import Sequence

from drumline.recipe.problem import Problem


class DrumlineError(Exception):
    """What was asked cannot be done; the message says what is wrong, where, and what would work."""


class CheckFailed(DrumlineError):  # noqa: N818 - the name is the verdict, not a kind of error
    """A check ran to its end and failed (a damaged file, a numeric gate, two runs that differ)."""


class RecipeError(DrumlineError):
    """A recipe cannot run; carries every problem that was found, not only the first.

    Args:
        problems: what is wrong, at least one.
        source: the recipe's name or file, for the first line of the message.
        mended: the words of a command that would work, for the last line; empty when none is known.
    """

    def __init__(self, problems: Sequence[Problem], source: str = "", mended: Sequence[str] = ()):
        self.problems = tuple(problems)
        self.source = source
        self.mended = tuple(mended)
        count = "a problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [f"recipe {source} has {count}:"] if source else []
        lines += [str(problem) for problem in self.problems]
        lines += [f"this would work: {shlex.join(self.mended)}"] if self.mended else []
        super().__init__("\n".join(lines))
