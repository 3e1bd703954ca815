"""Context parallelism: several ranks share a sequence, and attention over it is computed across them.

In: a rank's tokens of every row, its place in the split, process groups. Out: an `Attend` that the model calls as any.
"""

from drumline.parallel.context.attend import ContextGroups, context_attend, context_groups
from drumline.parallel.context.split import ContextSplit, unshard
from drumline.parallel.context.ulysses import heads_problem

__all__ = ["ContextGroups", "ContextSplit", "context_attend", "context_groups", "heads_problem", "unshard"]
