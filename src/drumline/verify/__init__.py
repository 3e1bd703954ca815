"""Proves that a layout computes what one device computes, on local ranks and a model made small.

In: recipes and layouts. Out: a verdict a layout: ratios of errors, the first tensor that is wrong, whether replicas are
equal bit for bit.
"""

from drumline.verify.choose import Chosen, Refused, of_recipe, of_table
from drumline.verify.exact import ExactResult, verify_exact
from drumline.verify.exact_matrix import EXACT_ROWS, of_exact_recipe, of_exact_table
from drumline.verify.judge import LIMITS, Verdict, judge
from drumline.verify.matrix import ROWS, Row
from drumline.verify.matrix import select as select_rows
from drumline.verify.run import Case, References, Result, verify
from drumline.verify.shrink import Shrunk, shrink

__all__ = [
    "EXACT_ROWS",
    "LIMITS",
    "ROWS",
    "Case",
    "Chosen",
    "ExactResult",
    "References",
    "Refused",
    "Result",
    "Row",
    "Shrunk",
    "Verdict",
    "judge",
    "of_exact_recipe",
    "of_exact_table",
    "of_recipe",
    "of_table",
    "select_rows",
    "shrink",
    "verify",
    "verify_exact",
]
