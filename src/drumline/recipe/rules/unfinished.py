"""What a recipe may say but no code runs yet: refused, never ignored. What comes to run leaves the table."""

from collections.abc import Iterator

from drumline.recipe.problem import Problem, problem
from drumline.recipe.rules.machine import Machine
from drumline.recipe.sections import Recipe

# key -> the values that run today, and what to say about the others
NOT_YET = {
    "numerics.blocks": ((1,), "products cannot be summed by blocks yet; what runs today is 1"),
}


def only_what_runs(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Every key of the table has a value that runs."""
    for key, (values, reason) in NOT_YET.items():
        found = problem(recipe, "not-yet", key, f"is refused: {reason}", values)
        if found.value not in values:
            yield found


UNFINISHED_RULES = (only_what_runs,)
