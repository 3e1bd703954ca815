"""Operators whose bits do not depend on batch size, position in the batch, chunking or threads, and a mode for them.

In: plain tensors. Out: what torch's operator of that name gives, up to rounding, with one order of additions; gradients
too. `classify` says what is known of any operator, `strict` refuses those of which nothing is.
"""

from drumline.numerics.invariant.attend import attention
from drumline.numerics.invariant.layers import embedding, rms_norm, swiglu
from drumline.numerics.invariant.loss import cross_entropy, cross_entropy_with_gradient
from drumline.numerics.invariant.products import linear, matmul, weight_gradient
from drumline.numerics.invariant.registry import OPERATORS, Entry, classify
from drumline.numerics.invariant.rows import log_softmax, mean, softmax, sum
from drumline.numerics.invariant.strict import NotInvariantError, strict

__all__ = [
    "OPERATORS",
    "Entry",
    "NotInvariantError",
    "attention",
    "classify",
    "cross_entropy",
    "cross_entropy_with_gradient",
    "embedding",
    "linear",
    "log_softmax",
    "matmul",
    "mean",
    "rms_norm",
    "softmax",
    "strict",
    "sum",
    "swiglu",
    "weight_gradient",
]
