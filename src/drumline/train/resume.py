"""Which recipe may go on from which commit: what defines the maths must be the same, how it is spread and reported
may change.
"""

from typing import Any

from drumline.recipe.errors import DrumlineError
from drumline.recipe.sections import Recipe

# Keys that may differ between a run and its continuation; everything else is part of what the run *is*.
_FREE = (
    "name",
    "layout",
    "memory",
    "checkpoint",
    "resilience",
    "metrics",
    "data.micro_batch",
    "data.num_workers",
    "data.prefetch",
    "data.cache_dir",
    "optimizer.implementation",
    "run.name",
    "run.dir",
    "run.steps",
    "run.device",
    "run.threads",
    "run.compile",
    "run.validate_every",
    "run.validation_batches",
    "run.profile",
)


class AnotherRunError(DrumlineError):
    """The run directory holds commits of a run that is defined otherwise."""


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """The keys that define a run and differ between two resolved recipes, with both values."""
    found = []
    for key in sorted(before.keys() | now.keys()):
        path = prefix + key
        if path in _FREE or key not in before:  # imported weights come with the model's shape and nothing else
            continue
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, path + ".")
        elif a != b:
            found.append((path, a, b))
    return found


def require_same_run(
    before: dict[str, Any], recipe: Recipe, where: object, *, sections: tuple[str, ...] | None = None
) -> None:
    """Checks that a recipe continues the run that a commit belongs to.

    Args:
        before: the commit's resolved recipe, as JSON values.
        recipe: that is about to run.
        where: the commit, for the message.
        sections: only these must be the same; None: all that define a run.

    Raises:
        AnotherRunError: lists every key that defines the run and differs.
    """
    now = recipe.model_dump(mode="json")
    changed = [row for row in differences(before, now) if sections is None or row[0].split(".")[0] in sections]
    if changed:
        lines = "\n".join(f"  {key}: {a!r} there, {b!r} here" for key, a, b in changed)
        raise AnotherRunError(
            f"{where} belongs to a run that is defined otherwise:\n{lines}\n"
            f"  set these keys back to go on, or give the new run a folder of its own: run.dir=..."
        )
