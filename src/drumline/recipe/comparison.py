"""What differs between two recipes, key by key."""

from dataclasses import dataclass
from typing import Any

from drumline.recipe.canonical import flat, is_maths
from drumline.recipe.problem import ABSENT
from drumline.recipe.sections import Recipe


@dataclass(frozen=True)
class Difference:
    """A key whose value differs.

    Attributes:
        key: the dotted key.
        first: its value in the first recipe; `ABSENT` where it has no such key (an element of a list, a scaling).
        second: its value in the second.
        is_maths: the key defines what is computed, not only how or where.
    """

    key: str
    first: Any
    second: Any
    is_maths: bool


def diff(first: Recipe, second: Recipe) -> list[Difference]:
    """Compares two recipes.

    Args:
        first: a recipe.
        second: another.

    Returns:
        The keys whose values differ, in the order of the sections; empty when the recipes are equal.
    """
    left, right = flat(first), flat(second)
    differences = []
    for key in dict.fromkeys([*left, *right]):
        one, other = left.get(key, ABSENT), right.get(key, ABSENT)
        if one != other:
            differences.append(Difference(key, one, other, is_maths(key)))
    return differences
