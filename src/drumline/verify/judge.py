"""Telling rounding from a fault: the verdict on a layout, from what it recorded and what one device computes. Pure.

    ratio = |candidate - exact| / max over one device's ways (|ordinary - exact|, floor)

Both are Euclidean norms over a tensor. 1 says that a layout is as far from fp64 as one device is; a fault is tens to
millions. The floor is what rounding each element once leaves of the norm, eps |exact|, so that a tensor in which one
device happens to be exact makes no ratio of rounding alone. Replicas are compared bit for bit.
"""

import math
from dataclasses import dataclass

import torch

from drumline.capture.keys import INIT, ROUTING, in_order, split_key
from drumline.capture.parts import Joined
from drumline.verify.reference import Reference

LIMITS = {"fp32": 4.0, "bf16": 2.0}
"""The largest ratio that rounding explains, by the precision that the layout computes in."""

EPS = {"fp32": 2.0**-24, "bf16": 2.0**-9}
"""Half the distance from 1 to the next number."""

SCALAR_FLOOR = {"fp32": 4 * EPS["fp32"], "bf16": EPS["bf16"]}
"""The floor of a loss or a norm, relative: a sum of thousands of terms in fp32 in both; its error is one draw, in which
one device may be lucky in all its ways. Sound layouts came to 5.4 eps.
"""


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        ok: the layout computes what one device computes.
        worst_ratio: largest ratio of errors.
        worst_key: the tensor that has it, `step/kind/name`.
        first_wrong: the first tensor that is wrong, in the order in which a step computes them; empty: none is.
        why: what is wrong with it, in words; empty: nothing.
        bitwise: all ranks that hold the same elements hold the same bits.
        flips: choices of experts that differ from fp64's, over all layers and steps.
        ratios: by key.
    """

    ok: bool
    worst_ratio: float
    worst_key: str
    first_wrong: str
    why: str
    bitwise: bool
    flips: int
    ratios: dict[str, float]


def judge(found: Joined, reference: Reference, precision: str) -> Verdict:
    """Judges a layout.

    Args:
        found: what its ranks recorded, joined.
        reference: what one device computes.
        precision: that both compute in, `fp32` or `bf16`.

    Returns:
        The verdict.
    """
    order = in_order(reference.exact)
    unequal, missing = set(found.unequal), set(found.missing)
    ratios: dict[str, float] = {}
    wrong: dict[str, str] = {}
    flips = 0
    for name in order:
        exact = reference.exact[name]
        mine = found.tensors.get(name)
        if mine is None or name in missing:
            wrong[name] = "no rank holds it" if mine is None else "no rank holds some of its elements"
            continue
        if mine.shape != exact.shape:
            wrong[name] = f"has shape {list(mine.shape)}, not {list(exact.shape)}"
            continue
        kind = split_key(name)[1]
        if kind == ROUTING:
            flips += int((mine - exact).abs().sum()) // 2
        else:
            ratios[name] = _ratio(name, mine, reference, precision)
            if not ratios[name] <= LIMITS[precision]:
                wrong[name] = (
                    "is not what one device draws"
                    if kind == INIT
                    else f"is {_times(ratios[name])} as far from fp64 as one device is"
                )
        if name in unequal:
            wrong.setdefault(name, "ranks that hold the same elements of it differ in their bits")
    for name in found.tensors:
        if name not in reference.exact:
            wrong[name] = "one device has no such tensor"
    first = next(iter(wrong), "")
    worst = max(ratios, key=lambda name: math.inf if math.isnan(ratios[name]) else ratios[name], default="")
    return Verdict(
        ok=not wrong,
        worst_ratio=ratios.get(worst, 0.0),
        worst_key=worst,
        first_wrong=first,
        why=wrong.get(first, ""),
        bitwise=not unequal,
        flips=flips,
        ratios=ratios,
    )


def _ratio(name: str, mine: torch.Tensor, reference: Reference, precision: str) -> float:
    exact = reference.exact[name].double()
    if split_key(name)[1] == INIT:  # drawn, not computed: fp64 has the very same numbers
        return 0.0 if torch.equal(mine.double(), exact) else math.inf
    floor = (EPS if exact.ndim else SCALAR_FLOOR)[precision] * float(exact.norm())
    allowed = max(floor, *(float((way[name].double() - exact).norm()) for way in reference.ordinary))
    error = float((mine.double() - exact).norm())
    if error == 0.0:
        return 0.0
    return error / allowed if allowed else math.inf


def _times(ratio: float) -> str:
    return f"{ratio:,.1f} times" if ratio < 1e6 else f"{ratio:.1e} times"
