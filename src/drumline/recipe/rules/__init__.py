"""The rules that join a recipe's keys: one small function each, of a recipe and the machine that it is for.

In: a `Recipe`, a `Machine`. Out: the problems that the rule finds. `RULES` has them all, in the order of the sections.
"""

from drumline.recipe.rules.every import RULES
from drumline.recipe.rules.machine import Machine

__all__ = ["RULES", "Machine"]
