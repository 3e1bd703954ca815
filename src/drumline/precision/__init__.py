"""Which bytes hold what: the dtypes of parameters, computation and gradient reduction.

In: the recipe's precision section. Out: a `Policy` of torch dtypes, from which models and parallel plans are built.
"""

from drumline.precision.denormals import flush_denormals
from drumline.precision.policy import Policy, policy

__all__ = ["Policy", "flush_denormals", "policy"]
