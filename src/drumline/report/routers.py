"""What the routers of a mixture of experts did, as columns: one a layer, and one over all layers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

OVER_LAYERS = {"load_max": np.max, "load_min": np.min, "entropy": np.mean, "dropped": np.mean}
"""What of the rows' `router` is drawn, and what stands for all layers: the worst load, else the mean."""


def router_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Reads the routers of step rows.

    Args:
        rows: of the steps, in order; what does not fit is passed over.

    Returns:
        `router.NAME` and, a layer, `router.NAME.LAYER`, each [N] with NaN where a row has none. Empty for a dense
        model; without `dropped` where nothing ever was.
    """
    routers = [row["router"] if isinstance(row.get("router"), dict) else {} for row in rows]
    layers = next((r["layers"] for r in reversed(routers) if isinstance(r.get("layers"), list) and r["layers"]), [])
    columns = {}
    for name, over_layers in OVER_LAYERS.items() if layers else ():
        values_NL = np.array([_numbers(router.get(name), len(layers)) for router in routers], dtype=np.float64)
        if name == "dropped" and not np.nansum(values_NL):
            continue
        columns[f"router.{name}"] = over_layers(values_NL, axis=1)
        columns |= {f"router.{name}.{layer}": values_NL[:, index] for index, layer in enumerate(layers)}
    return columns


def _numbers(values: Any, count: int) -> list[float]:
    fits = isinstance(values, list) and len(values) == count
    if not fits or not all(isinstance(value, int | float) and abs(value) < 1e300 for value in values):
        return [math.nan] * count
    return values
