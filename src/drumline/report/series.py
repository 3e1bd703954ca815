"""Long series made short enough to draw, without losing what stands out.

A run of a million steps is drawn from at most some thousand points: of each stretch of steps the least and the
greatest value stay, so that a spike of a single step is still seen.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np


def thin(values: np.ndarray, limit: int) -> np.ndarray:
    """Chooses the points to draw.

    Args:
        values: [N] float; NaN where there is none.
        limit: most points wanted, at least 4.

    Returns:
        [K] int64, rising indices: all where N <= limit, else at most `limit`, namely the first, the last, and the least
        and the greatest of each stretch.
    """
    num_points = len(values)
    if num_points <= limit:
        return np.arange(num_points)
    num_stretches = (limit - 2) // 2
    edges = np.linspace(0, num_points, num_stretches + 1).astype(np.int64)
    low = np.where(np.isnan(values), np.inf, values)
    high = np.where(np.isnan(values), -np.inf, values)
    chosen = {0, num_points - 1}
    for start, stop in pairwise(edges):
        chosen.add(int(start + np.argmin(low[start:stop])))
        chosen.add(int(start + np.argmax(high[start:stop])))
    return np.array(sorted(chosen), dtype=np.int64)


def smooth(values: np.ndarray, span: float) -> np.ndarray:
    """Exponential moving average, corrected for its start as Adam's moments are (arXiv:1412.6980).

    Args:
        values: [N] float; values that are not finite are passed over.
        span: steps over which about 63 % of the weight lies.

    Returns:
        [N] float64; NaN until the first finite value.
    """
    keep = np.exp(-1.0 / span)
    total, weight = 0.0, 0.0
    smoothed = np.full(len(values), np.nan)
    for index, value in enumerate(values.tolist()):
        if np.isfinite(value):
            total = keep * total + (1 - keep) * value
            weight = keep * weight + (1 - keep)
        if weight:
            smoothed[index] = total / weight
    return smoothed


def to_json_numbers(values: Sequence[float] | np.ndarray) -> list[Any]:
    """Numbers of six significant digits; null where they are not finite, as JSON has no other word for it."""
    return [_short(value) for value in np.asarray(values, dtype=np.float64).tolist()]


def _short(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")
