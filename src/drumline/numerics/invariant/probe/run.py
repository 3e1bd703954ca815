"""One operator's probe, drumline's form and torch's."""

from collections import Counter
from dataclasses import dataclass

import torch

from drumline.numerics import invariant
from drumline.numerics.invariant.probe.contrast import Torch
from drumline.numerics.invariant.probe.operators import ELEMENTWISE_CONTRAST, OPERATORS, Probe


@dataclass(frozen=True)
class Found:
    """What a probe found.

    Attributes:
        num_outputs: elements compared.
        num_moved: those whose bits differ.
        moved_by: the same by what was varied: batch, position, chunk, threads; those with none are left out.
    """

    num_outputs: int
    num_moved: int
    moved_by: dict[str, int]


def probe(name: str, dtype: torch.dtype, quick: bool, *, of_torch: bool = False) -> Found:
    """Probes one operator.

    Args:
        name: one of `NAMES`.
        dtype: of the inputs.
        quick: fewer shapes.
        of_torch: probe what torch has under that name (`elementwise`: sigmoid, rsqrt and exp2).

    Returns:
        The counts.
    """
    chosen: Probe = ELEMENTWISE_CONTRAST if of_torch and name == "elementwise" else OPERATORS[name]
    moved: Counter[str] = Counter()
    num_outputs = 0
    for trial in chosen(Torch if of_torch else invariant, dtype, quick):
        num_outputs += trial.num_outputs
        if trial.num_moved:
            moved[trial.axis] += trial.num_moved
    return Found(num_outputs, sum(moved.values()), dict(moved))
