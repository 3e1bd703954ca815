"""Telling rounding from a fault: errors against fp64 as ratios to those of one device. Pure.

    ratio = |candidate - exact| / max over one device's ways (|ordinary - exact|, floor)

Both are Euclidean norms over a tensor. 1 says that a candidate is as far from fp64 as one device is; a fault is tens to
millions. The floor is what rounding each element once leaves of the norm, eps |exact|, so that a tensor in which one
device happens to be exact makes no ratio of rounding alone.
"""

import math

import torch

EPS = {"fp32": 2.0**-24, "bf16": 2.0**-9}
"""Half the distance from 1 to the next number."""

SCALAR_FLOOR = {"fp32": 4 * EPS["fp32"], "bf16": EPS["bf16"]}
"""The floor of a loss or a norm, relative: a sum of thousands of terms in fp32 in both; its error is one draw, in which
one device may be lucky in all its ways. Sound layouts came to 5.4 eps.
"""


def error_of(mine: torch.Tensor, exact: torch.Tensor) -> float:
    """|mine - exact|, Euclidean, in fp64."""
    return float((mine.double() - exact.double()).norm())


def error_ratio(error: float, exact: torch.Tensor, ordinary: float, precision: str) -> float:
    """The ratio of an error.

    Args:
        error: of the candidate, as `error_of`.
        exact: in fp64.
        ordinary: the largest error of one device's ways.
        precision: that both compute in, `fp32` or `bf16`.

    Returns:
        The ratio; inf where something is where nothing should be.
    """
    if error == 0.0:
        return 0.0
    floor = (EPS if exact.ndim else SCALAR_FLOOR)[precision] * float(exact.double().norm())
    allowed = max(floor, ordinary)
    return error / allowed if allowed else math.inf
