"""Which recipe may go on from which commit: what defines the maths must be the same; how it is spread and reported may
change, and a run may be made longer or shorter.
"""

from typing import Any

from drumline.recipe import ABSENT, DrumlineError, Recipe, flat, is_maths


class AnotherRunError(DrumlineError):
    """The run directory holds commits of a run that is defined otherwise."""


def differences(before: dict[str, Any], recipe: Recipe) -> list[tuple[str, Any, Any]]:
    """The keys that define a run and differ.

    Args:
        before: a commit's resolved recipe, as JSON values.
        recipe: that is about to run.

    Returns:
        (key, value there, value here).
    """
    there, here = flat(before), flat(recipe)
    changed = [key for key in sorted(there.keys() | here.keys()) if there.get(key, ABSENT) != here.get(key, ABSENT)]
    return [
        (key, there.get(key, ABSENT), here.get(key, ABSENT))
        for key in changed
        if is_maths(key, exact=recipe.numerics.mode == "exact") and key != "run.steps" and _is_known(key, there)
    ]


def _is_known(key: str, there: dict[str, Any]) -> bool:
    """Whether the commit's recipe says anything about a key. Imported weights come with the model's shape and nothing
    else, and an older drumline knew fewer keys; but a section that was absent, and a list that was shorter, were known.
    """
    parts = key.split(".")
    above = [".".join(parts[: index + 1]) for index in range(len(parts))]
    lists = [above[index - 1] for index, part in enumerate(parts) if part.isdigit()]
    return any(name in there for name in above) or any(name.startswith(f"{each}.") for each in lists for name in there)


def require_same_run(before: dict[str, Any], recipe: Recipe, where: object) -> None:
    """Checks that a recipe continues the run that a commit belongs to.

    Args:
        before: the commit's resolved recipe, as JSON values.
        recipe: that is about to run.
        where: the commit, for the message.

    Raises:
        AnotherRunError: lists every key that defines the run and differs.
    """
    changed = differences(before, recipe)
    if changed:
        lines = "\n".join(f"  {key}: {a!r} there, {b!r} here" for key, a, b in changed)
        raise AnotherRunError(
            f"{where} belongs to a run that is defined otherwise:\n{lines}\n"
            f"  set these keys back to go on, or give the new run a folder of its own: run.dir=..."
        )
