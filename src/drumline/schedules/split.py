"""Cutting a model into pipeline stages: runs of layers, so that the slowest stage is as fast as it can be.

A step takes as long as its slowest stage makes it, so the largest cost of a stage is minimized, exactly, by dynamic
programming over (stages, layers); among the cuts that reach it, one with the least sum of squares, so that the other
stages are even too.
    worst(s, n) = min over k < n of max(worst(s - 1, k), cost of layers k to n - 1)
The embedding's cost falls on the first stage, the output's on the last.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from drumline.recipe.errors import DrumlineError


def split_layers(
    layer_costs: Sequence[float], num_stages: int, *, embedding_cost: float = 0.0, output_cost: float = 0.0
) -> tuple[range, ...]:
    """Cuts layers into stages.

    Args:
        layer_costs: of each layer, from 0 on, in any one unit.
        num_stages: stages of the model; each gets at least one layer.
        embedding_cost: of what comes before the first layer.
        output_cost: of what comes after the last layer.

    Returns:
        For each stage the indices of its layers.

    Raises:
        DrumlineError: there are fewer layers than stages.
    """
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise DrumlineError(f"{num_layers} layers cannot be cut into {num_stages} stages of at least one layer each")
    until = [0.0, *accumulate(layer_costs)]

    def cost(first: int, end: int) -> float:
        ends = (embedding_cost if first == 0 else 0.0) + (output_cost if end == num_layers else 0.0)
        return until[end] - until[first] + ends

    worst, _ = _best(num_layers, num_stages, cost, max)
    _, cuts = _best(
        num_layers, num_stages, lambda a, b: _square_up_to(cost(a, b), worst), lambda before, here: before + here
    )
    return tuple(range(first, end) for first, end in zip((0, *cuts), (*cuts, num_layers), strict=True))


def _square_up_to(cost: float, limit: float) -> float:
    return cost * cost if cost <= limit else float("inf")


def _best(
    num_layers: int,
    num_stages: int,
    cost: Callable[[int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The least joined cost of cutting all layers into stages, and where to cut, the earliest cuts first."""
    infinite = float("inf")
    row = [infinite, *(cost(0, end) for end in range(1, num_layers + 1))]
    choices: list[list[int]] = []
    for stage in range(1, num_stages):
        following, chosen = [infinite] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(stage + 1, num_layers + 1):
            following[end], chosen[end] = min((join(row[k], cost(k, end)), k) for k in range(stage, end))
        row = following
        choices.append(chosen)
    cuts, end = [], num_layers
    for chosen in reversed(choices):
        end = chosen[end]
        cuts.append(end)
    return row[num_layers], tuple(reversed(cuts))
