"""The exceptions that a user can cause, and how they end a command.

    Exception
    +-- DrumlineError        the request cannot be met: exit code 2
        +-- RecipeError      a recipe has problems, all of them listed
        +-- CheckFailed      a check ran and its answer is no: exit code 1

A room that needs its own kind derives it from `DrumlineError` (or from `CheckFailed`) in its own folder. Anything else that escapes
is a fault of drumline itself: exit code 3. A message says what is wrong, where, and what would work.
"""

from collections.abc import Sequence

from drumline.recipe.problem import Problem


class DrumlineError(Exception):
    """What was asked cannot be done; the message says what is wrong, where, and what would work."""


class CheckFailed(DrumlineError):
    """A check ran to its end and failed (a damaged file, a numeric gate, two runs that differ)."""


class RecipeError(DrumlineError):
    """A recipe cannot run; carries every problem that was found, not only the first.

    Args:
        problems: what is wrong, at least one.
        command: what the user typed up to the overrides, such as `drumline train llama3-8b`; a line to try starts with it.
    """

    def __init__(self, problems: Sequence[Problem], command: str = ""):
        self.problems = tuple(problems)
        self.command = command
        super().__init__("\n".join(problem.render(command) for problem in self.problems))
