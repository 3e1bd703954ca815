"""Exact mode: gradients whose bits no layout changes.

In: a model in its layout, the lanes of the recipe. Out: `Gradients` that keep micro-batches apart, sum them in the
order of the recipe, and take them over ranks by its tree. What computes a weight's gradient piece by piece hands the
pieces to `Deposits`. And a decoder's operators in fixed pieces, for layouts that share out products.
"""

from drumline.parallel.exact.apply import compute_in_pieces, exact_attend
from drumline.parallel.exact.deposits import Deposits
from drumline.parallel.exact.own import make_exact_groups, own_exact_gradients

__all__ = ["Deposits", "compute_in_pieces", "exact_attend", "make_exact_groups", "own_exact_gradients"]
