"""A baseline: what a small recipe computes in fp64, how far one device is from that, and limits with their reasons.

    DIR/recipe.json            the recipe, to be captured: `drumline numerics capture DIR/recipe.json layout=tp2`
    DIR/exact.safetensors      every tensor in fp64, by key
    DIR/baseline.json          one device's errors, limits, and the variants that set them

Tiers
    A  semantics: run in fp32, errors against fp64 as ratios to one device's; finds what is computed wrongly
    B  the same in the recipe's own precision; finds what is rounded where it should not be
    C  statistics: root mean square, mean and extremes; needs no tensors
    D  bits: replicas equal, nothing left out, recomputation the same
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.capture.digest import Statistics, statistics
from drumline.capture.files import RankFile
from drumline.capture.keys import in_order
from drumline.capture.reading import CaptureError

FILE, EXACT, RECIPE, FORMAT = "baseline.json", "exact.safetensors", "recipe.json", 1
TIER_OF = {"fp32": "A", "bf16": "B"}
"""The tier that a capture is judged in, by the precision that it computed in."""

MARGIN = 3.0
"""Limits are so many times the worst of the variants that they were calibrated on."""

SMALLEST = {"A": 3.0, "B": 2.0, "C fp32": 1e-5, "C bf16": 1e-2}
"""No limit is below this: variants that happen to round as one device does say nothing of others."""


@dataclass(frozen=True)
class Limit:
    """What a kind of tensor may come to in a tier.

    Attributes:
        limit: largest value that passes.
        worst: of the variants.
        reason: which variant and tensor it was, and the margin.
    """

    limit: float
    worst: float
    reason: str


@dataclass(frozen=True)
class Baseline:
    """A baseline that is read.

    Attributes:
        folder: of it.
        recipe: as JSON values.
        steps: that it has.
        errors: by precision and key, the largest error of one device's ways.
        limits: by tier (`A`, `B`, `C fp32`, `C bf16`) and kind.
        variants: that set the limits.
        exact: file of the tensors in fp64.
    """

    folder: Path
    recipe: Mapping[str, Any]
    steps: tuple[int, ...]
    errors: Mapping[str, Mapping[str, float]]
    limits: Mapping[str, Mapping[str, Limit]]
    variants: tuple[str, ...]
    exact: RankFile

    @property
    def keys(self) -> list[str]:
        """All keys, in the order in which a step computes them."""
        return in_order(part.key for part in self.exact.parts)

    def read(self, key: str) -> torch.Tensor:
        """A tensor in fp64."""
        index = next(index for index, part in enumerate(self.exact.parts) if part.key == key)
        return self.exact.part(index).tensor

    def write(self) -> None:
        """Writes all but the tensors."""
        document = {
            "format": FORMAT,
            "steps": self.steps,
            "variants": self.variants,
            "limits": {
                tier: {kind: asdict(each) for kind, each in kinds.items()} for tier, kinds in self.limits.items()
            },
            "errors": self.errors,
        }
        (self.folder / FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (self.folder / RECIPE).write_text(json.dumps(dict(self.recipe), indent=1) + "\n", encoding="utf-8")


def read_baseline(folder: Path) -> Baseline:
    """Reads a baseline.

    Args:
        folder: that `drumline numerics calibrate` wrote.

    Returns:
        The baseline.

    Raises:
        CaptureError: it is none, or one of another version.
    """
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        recipe = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"it has format {found['format']}, this version reads {FORMAT}")
        limits = {
            tier: {kind: Limit(**limit) for kind, limit in kinds.items()} for tier, kinds in found["limits"].items()
        }
        return Baseline(
            folder,
            recipe,
            tuple(found["steps"]),
            found["errors"],
            limits,
            tuple(found["variants"]),
            RankFile(folder / EXACT),
        )
    except FileNotFoundError as error:
        raise CaptureError(
            f"{folder} is no baseline (it has no {Path(error.filename or '').name})\n"
            f"  try: drumline numerics calibrate RECIPE --out {folder}"
        ) from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CaptureError(f"{folder} cannot be read as a baseline: {error}") from error


def deviation(mine: Statistics, exact: Statistics) -> float:
    """How far statistics are off: the largest of root mean square and extreme, relative, and mean over rms.

    Args:
        mine: of the candidate.
        exact: of fp64.

    Returns:
        The deviation; inf where the candidate has values that are not finite and fp64 has not.
    """
    if mine.num_nan + mine.num_infinite > exact.num_nan + exact.num_infinite:
        return float("inf")
    if exact.rms == 0.0:
        return 0.0 if mine.rms == 0.0 else float("inf")
    return max(
        abs(mine.rms / exact.rms - 1.0),
        abs(mine.largest_magnitude / exact.largest_magnitude - 1.0),
        abs(mine.mean - exact.mean) / exact.rms,
    )


def statistics_of(tensor: torch.Tensor) -> Statistics:
    """Of a whole tensor."""
    return statistics(tensor)


def limit_of(tier: str, found: Iterable[tuple[float, str, str]]) -> Limit:
    """A limit from what variants came to.

    Args:
        tier: that it is for.
        found: (value, variant, key) each, at least one.

    Returns:
        The limit, with its reason.
    """
    worst, variant, key = max(found)
    limit, least = MARGIN * worst, SMALLEST[tier]
    reason = f"{MARGIN:g} times the worst variant, {variant} at {key}: {worst:.3g}"
    if limit < least:
        reason = f"{least:g}, the least that is demanded; the worst variant, {variant} at {key}, came to {worst:.3g}"
    return Limit(max(limit, least), worst, reason)
