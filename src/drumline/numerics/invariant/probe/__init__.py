"""Looking for a counterexample: does an operator's result change with batch, position, chunks or threads?

In: the name of an operator, a dtype. Out: how many elements were compared and how many differ, for drumline's operator
and for torch's beside it; and what the one costs in terms of the other.
"""

from drumline.numerics.invariant.probe.cost import Cost, cost
from drumline.numerics.invariant.probe.operators import NAMES
from drumline.numerics.invariant.probe.run import Found, probe

__all__ = ["NAMES", "Cost", "Found", "cost", "probe"]
