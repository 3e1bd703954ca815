"""The verdict on a layout, from what it recorded and what one device computes: ratios of errors, and bits. Pure.

The ratio is that of `drumline.capture.ratio`; replicas are compared bit for bit.
"""

import math
from dataclasses import dataclass

import torch

from drumline.capture.keys import GRADIENT, INIT, NORM, ROUTING, in_order, split_key
from drumline.capture.parts import Joined
from drumline.capture.ratio import error_of, error_ratio
from drumline.verify.reference import Reference

LIMITS = {"fp32": 4.0, "bf16": 2.0}
"""The largest ratio that rounding explains, by the precision that the layout computes in."""


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
    ordinary = max(way[name] for way in reference.errors)
    if split_key(name)[1] == NORM:
        ordinary = max(ordinary, _error_of_gradient(name.split("/")[0], reference))
    return error_ratio(error_of(mine, exact), exact, ordinary, precision)


def _error_of_gradient(step: str, reference: Reference) -> float:
    """How far one device's whole gradient is from fp64.

    Its norm may be off by as much, | |g'| - |g| | <= |g' - g|; how far it is in one draw is luck, the more in bf16 and
    in many layers.
    """
    names = [name for name in reference.exact if name.startswith(f"{step}/{GRADIENT}/")]
    return max(math.hypot(*(way[name] for name in names)) for way in reference.errors)


def _times(ratio: float) -> str:
    return f"{ratio:,.1f} times" if ratio < 1e6 else f"{ratio:.1e} times"
