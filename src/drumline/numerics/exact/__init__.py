"""Operators whose bits do not depend on who computes which part: fixed shapes, and sums over fixed trees.

In: plain tensors, cut into chunks and blocks that belong to the recipe. Out: results, and leaves of sums.
"""

from drumline.numerics.exact.leaves import LeafSum, leaf_sum
from drumline.numerics.exact.norm import rms_norm, rms_norm_gradients
from drumline.numerics.exact.pieces import (
    aligned,
    chunked,
    column_blocks,
    cut_rows,
    in_blocks,
    joined_blocks,
    mirrored,
    row_blocks,
    unchunked,
    wide,
)
from drumline.numerics.exact.products import (
    column_gradient,
    product,
    row_gradients,
    spread_product,
    summed_product,
)
from drumline.numerics.exact.swiglu import swiglu

__all__ = [
    "LeafSum",
    "aligned",
    "chunked",
    "column_blocks",
    "column_gradient",
    "cut_rows",
    "in_blocks",
    "joined_blocks",
    "leaf_sum",
    "mirrored",
    "product",
    "rms_norm",
    "rms_norm_gradients",
    "row_blocks",
    "row_gradients",
    "spread_product",
    "summed_product",
    "swiglu",
    "unchunked",
    "wide",
]
