"""What a recipe may say but no code runs yet: refused, never ignored. What comes to run leaves the table."""

from collections.abc import Iterator

from drumline.recipe.problem import Problem, problem
from drumline.recipe.rules.machine import Machine
from drumline.recipe.sections import Recipe

_DATA_PARALLEL = "what runs today is data parallelism, layout.dp and layout.fsdp with layout.zero 1, 2 or 3"
# key -> the values that run today, and what to say about the others
NOT_YET = {
    "layout.tp": ((1,), f"tensor parallelism cannot run yet; {_DATA_PARALLEL}"),
    "layout.cp": ((1,), f"context parallelism cannot run yet; {_DATA_PARALLEL}"),
    "layout.pp": ((1,), f"pipeline parallelism cannot run yet; {_DATA_PARALLEL}"),
    "layout.ep": ((1,), f"expert parallelism cannot run yet; {_DATA_PARALLEL}"),
    "numerics.mode": (("default",), "bits that no layout changes cannot be had yet; what runs today is default"),
}


def only_what_runs(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Every key of the table has a value that runs."""
    for key, (values, reason) in NOT_YET.items():
        found = problem(recipe, "not-yet", key, f"is refused: {reason}", values)
        if found.value not in values:
            yield found


UNFINISHED_RULES = (only_what_runs,)
