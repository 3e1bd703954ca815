"""The rules that join a recipe's keys: one small function each, of a recipe and the machine that it is for.

In: a `Recipe`, a `Machine`. Out: the problems that the rule finds. `RULES` has them all, in the order of the sections.
"""

from drumline.recipe.rules.batches import BATCH_RULES
from drumline.recipe.rules.machine import MACHINE_RULES, Machine
from drumline.recipe.rules.model import MODEL_RULES
from drumline.recipe.rules.spread import SPREAD_RULES
from drumline.recipe.rules.unfinished import UNFINISHED_RULES

__all__ = ["RULES", "Machine"]

RULES = (*MODEL_RULES, *BATCH_RULES, *SPREAD_RULES, *UNFINISHED_RULES, *MACHINE_RULES)
