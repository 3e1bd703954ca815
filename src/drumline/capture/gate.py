"""A capture judged against a baseline: does it compute what fp64 computes, up to what its precision explains?

Tiers are those of `baseline`. A mixture of experts chooses: where rounding moves a token to another expert, what
follows is another model. Such a flip is told as one, and what comes after it is not judged. It is explained by rounding
where the scores that were exchanged lie no further apart in fp64 than the candidate's error of that token's scores;
else it is a fault of the choice.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from drumline.capture.baseline import TIER_OF, Baseline, deviation, statistics_of
from drumline.capture.diff import ALWAYS_THERE, NotComparableError, why_at_odds
from drumline.capture.keys import CHOICE, INIT, RECOMPUTE, ROUTER, in_order, key, split_key
from drumline.capture.ratio import error_of, error_ratio
from drumline.capture.reading import Capture
from drumline.recipe import flat, is_maths


@dataclass(frozen=True)
class Check:
    """One tensor in one tier.

    Attributes:
        tier: `A` to `D`.
        key: of the tensor.
        value: ratio or deviation; 0 in tier D.
        limit: largest that passes.
        why: what is wrong; empty: it passes.
    """

    tier: str
    key: str
    value: float
    limit: float
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """What was found about a capture.

    Attributes:
        folder: of the capture.
        layout: that it ran in.
        precision: that it computed in.
        checks: in the order in which a step computes their tensors.
        flips: choices of experts that rounding moved, by key.
        unjudged: tensors that come after a flip.
        skipped: tiers that did not run, with the reason.
    """

    folder: str
    layout: str
    precision: str
    checks: tuple[Check, ...]
    flips: tuple[tuple[str, int], ...]
    unjudged: int
    skipped: tuple[tuple[str, str], ...]

    @property
    def failed(self) -> list[Check]:
        """Checks that do not pass."""
        return [check for check in self.checks if check.why]

    @property
    def passes(self) -> bool:
        """Whether all do."""
        return not self.failed

    def worst(self, tier: str) -> Check | None:
        """The check of a tier that comes nearest to its limit, or goes farthest beyond."""
        found = [check for check in self.checks if check.tier == tier]
        return max(found, key=lambda check: _share(check), default=None)


def _share(check: Check) -> float:
    if math.isnan(check.value):
        return math.inf
    if not check.limit:
        return math.inf if check.value else 0.0
    return check.value / check.limit


def gate(capture: Capture, baseline: Baseline) -> Verdict:
    """Judges a capture.

    Args:
        capture: of the baseline's recipe, in any layout and precision.
        baseline: what it should compute.

    Returns:
        The verdict.

    Raises:
        NotComparableError: it is of another recipe or of other steps.
    """
    precision = capture.manifest.recipe["precision"]["compute"]
    _require_comparable(capture, baseline, precision)
    keys = set(baseline.keys)
    checks = list(_bits(capture))
    skipped: list[tuple[str, str]] = []
    flips: dict[str, int] = {}
    judged = [name for name in baseline.keys if name in capture]
    checks += _missing(capture, baseline)
    if capture.has_elements:
        checks += _choices(capture, baseline, [name for name in judged if split_key(name)[1] == CHOICE], flips)
    else:
        level = capture.manifest.level
        skipped.append((TIER_OF[precision], f"needs --level tensors, the capture is of level {level}"))
        if level == "hash":
            skipped.append(("C", "needs --level stats or tensors"))
            judged = []
    unjudged = _after(judged, flips)
    for name in judged:
        if split_key(name)[1] != CHOICE and name not in unjudged and name in keys:
            checks += _values(capture, baseline, name, precision)
    place = {name: at for at, name in enumerate(in_order({check.key for check in checks}))}
    checks.sort(key=lambda check: (place[check.key], check.tier))
    return Verdict(
        folder=str(capture.folder),
        layout=capture.manifest.layout,
        precision=precision,
        checks=tuple(checks),
        flips=tuple(flips.items()),
        unjudged=len(unjudged),
        skipped=tuple(skipped),
    )


def _require_comparable(capture: Capture, baseline: Baseline, precision: str) -> None:
    mine, theirs = flat(dict(capture.manifest.recipe)), flat(dict(baseline.recipe))
    other = [
        f"{name} = {mine.get(name)}, in the baseline {theirs.get(name)}"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name) and is_maths(name) and not name.startswith("precision.")
    ]
    if other:
        raise NotComparableError(
            f"{capture.folder} is of another recipe than {baseline.folder}:\n  " + "\n  ".join(other) + "\n"
            f"  try: drumline numerics capture {baseline.folder}/recipe.json [layout=...] --steps "
            f"{','.join(map(str, baseline.steps))}"
        )
    if precision not in baseline.errors:
        raise NotComparableError(
            f"{capture.folder} computed in {precision}; {baseline.folder} has limits for {', '.join(baseline.errors)}"
        )
    if not set(capture.manifest.steps) & set(baseline.steps):
        raise NotComparableError(
            f"{capture.folder} has steps {list(capture.manifest.steps)}, {baseline.folder} has {list(baseline.steps)}"
        )


def _bits(capture: Capture) -> Iterator[Check]:
    """Tier D: each tensor against itself."""
    for name in capture.keys:
        if capture.has_elements:
            why = why_at_odds(capture, capture.read(name), name)
        else:
            digest, is_replicated = capture.digest(name)
            why = "" if is_replicated else "ranks that hold the same elements differ in their bits"
            if digest is None and not why:
                why = "no rank holds some of its elements"
            step, kind, module = split_key(name)
            first = key(step, "forward", module)
            if kind == RECOMPUTE and first in capture and not why:
                before = capture.digest(first)[0]
                if digest is not None and before is not None and before.hash != digest.hash:
                    why = "something else was computed again than before"
        yield Check("D", name, 0.0, 0.0, why)


def _missing(capture: Capture, baseline: Baseline) -> Iterator[Check]:
    if capture.manifest.only:
        return
    for name in baseline.keys:
        step, kind, _ = split_key(name)
        if kind in ALWAYS_THERE and step in capture.manifest.steps and name not in capture:
            yield Check("D", name, 0.0, 0.0, "no rank recorded it")
    known = set(baseline.keys)
    for name in capture.keys:
        step, kind, _ = split_key(name)
        if kind in ALWAYS_THERE and step in baseline.steps and name not in known:
            yield Check("D", name, 0.0, 0.0, "one device has no such tensor")


def _values(capture: Capture, baseline: Baseline, name: str, precision: str) -> Iterator[Check]:
    """Tiers A or B, and C, of one tensor."""
    kind = split_key(name)[1]
    exact = baseline.read(name)
    if capture.shape(name) != tuple(exact.shape):
        yield Check("D", name, 0.0, 0.0, f"has shape {list(capture.shape(name))}, not {list(exact.shape)}")
        return
    if capture.has_elements:
        mine = capture.read(name).tensor
        error = error_of(mine, exact)
        tier = TIER_OF[precision]
        if kind == INIT:  # drawn, not computed: fp64 has the very same numbers
            yield Check(tier, name, error, 0.0, "" if error == 0.0 else "is not what one device draws")
            return
        limit = baseline.limits[tier][kind].limit
        value = error_ratio(error, exact, baseline.errors[precision][name], precision)
        why = "" if value <= limit else f"is {_times(value)} as far from fp64 as one device is; {limit:.3g} may be"
        yield Check(tier, name, value, limit, why)
        found = statistics_of(mine)
    else:
        digest, _ = capture.digest(name)
        if digest is None or digest.statistics is None:
            return
        found = digest.statistics
    if kind == INIT:
        return
    limit = baseline.limits[f"C {precision}"][kind].limit
    value = deviation(found, statistics_of(exact))
    why = "" if value <= limit else f"has statistics that are off by {value:.3g}; {limit:.3g} may be"
    yield Check("C", name, value, limit, why)


def _times(value: float) -> str:
    return f"{value:,.1f} times" if value < 1e6 else f"{value:.1e} times"


def _choices(capture: Capture, baseline: Baseline, names: Iterable[str], flips: dict[str, int]) -> Iterator[Check]:
    """Tier A of choices; `flips` gets those that rounding explains."""
    for name in names:
        mine_NK, exact_NK = capture.read(name).tensor, baseline.read(name)
        moved_N = (mine_NK != exact_NK).any(dim=1)
        if not bool(moved_N.any()):
            continue
        num_unexplained = 0
        step, _, module = split_key(name)
        logits = key(step, ROUTER, module)
        mine_NE, exact_NE = capture.read(logits).tensor.double(), baseline.read(logits).double()
        for row in moved_N.nonzero().flatten().tolist():
            num_unexplained += not _is_explained(mine_NK[row], exact_NK[row], mine_NE[row], exact_NE[row])
        if num_unexplained and not _after([name], flips):
            why = f"{num_unexplained} tokens go to experts that rounding of their scores does not explain"
            yield Check("A", name, float(num_unexplained), 0.0, why)
        else:
            flips[name] = int(moved_N.sum())


def _is_explained(mine_K: torch.Tensor, exact_K: torch.Tensor, mine_E: torch.Tensor, exact_E: torch.Tensor) -> bool:
    """Whether the scores that were exchanged are as near as the error of this token's scores."""
    taken, left = set(mine_K.tolist()) - set(exact_K.tolist()), set(exact_K.tolist()) - set(mine_K.tolist())
    num_experts = len(exact_E)
    if any(expert >= num_experts for expert in taken | left):  # a dropped choice follows from those of other tokens
        return True
    gap = max(float(exact_E[expert]) for expert in left) - min(float(exact_E[expert]) for expert in taken)
    return gap <= 2.0 * float((mine_E - exact_E).abs().max())


def _after(names: list[str], flips: dict[str, int]) -> set[str]:
    """The names that are computed after the first flip."""
    if not flips:
        return set()
    ordered = in_order([*names, *flips])
    first = min(ordered.index(name) for name in flips)
    return set(ordered[first + 1 :]) - set(flips)
