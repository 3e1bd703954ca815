"""Two captures held against each other, key by key, in the order in which a step computes them.

The first key that differs is where to look: all before it is equal, and what follows may only carry it on. Each capture
is also held against itself: ranks that hold the same elements must hold the same bits, and what activation
checkpointing computes again must be what the forward computed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from drumline.capture.digest import Digest, Statistics, digest, starts_of_box
from drumline.capture.keys import FORWARD, GRADIENT, LOSS, NORM, OPTIMIZER, RECOMPUTE, WEIGHT, in_order, key, split_key
from drumline.capture.metrics import Difference, difference, error_map
from drumline.capture.operator_diff import OperatorDiff, diff_operators
from drumline.capture.parts import same_bits
from drumline.capture.reading import Capture, Whole
from drumline.recipe import flat, is_maths
from drumline.recipe.errors import DrumlineError

EQUAL, DIFFERENT = "equal", "different"
ALWAYS_THERE = frozenset((LOSS, GRADIENT, NORM, OPTIMIZER, WEIGHT))
"""Kinds that every layout records; others depend on recomputation and compilation."""

NOBODY = ((-1, -1), (-1, -1))


class NotComparableError(DrumlineError):
    """Two captures have nothing that could be held against each other."""


@dataclass(frozen=True)
class Row:
    """One key.

    Attributes:
        key: `step/kind/name`.
        status: `equal`, or `different`: beyond the tolerance, or at odds with itself.
        why: what is wrong, in words; empty where nothing is.
        dtypes: in a and in b.
        shape: of both.
        difference: None where only hashes were kept and differ.
        statistics: of a and b, where hashes differ and statistics were kept.
        holders: rank and micro-batch of the element that differs most, in a and in b; -1: none.
        map: coarse map of the difference, where it was asked for.
    """

    key: str
    status: str
    why: str
    dtypes: tuple[str, str]
    shape: tuple[int, ...]
    difference: Difference | None = None
    statistics: tuple[Statistics, Statistics] | None = None
    holders: tuple[tuple[int, int], tuple[int, int]] = NOBODY
    map: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Diff:
    """What became of a comparison.

    Attributes:
        folders: of a and b.
        layouts: of a and b.
        levels: of a and b.
        tolerance: relative Frobenius up to which a key is equal; 0: bit for bit.
        rows: of keys that both have, in order.
        only: keys that only a, only b has.
        recipe: keys of the recipe that mean other maths, with both values.
        missing: of the keys that only one has, those that the other should have.
        operators: those inside modules; None: not both have any.
    """

    folders: tuple[str, str]
    layouts: tuple[str, str]
    levels: tuple[str, str]
    tolerance: float
    rows: tuple[Row, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    recipe: tuple[tuple[str, Any, Any], ...]
    missing: tuple[str, ...]
    operators: OperatorDiff | None = None

    @property
    def different(self) -> list[Row]:
        """The rows that differ."""
        return [row for row in self.rows if row.status != EQUAL]

    @property
    def first(self) -> str:
        """The first key of a tensor that differs; empty: none does."""
        found = [*(row.key for row in self.different), *self.missing]
        return in_order(found)[0] if found else ""

    @property
    def is_equal(self) -> bool:
        """Nothing differs."""
        return not self.first and not (self.operators and self.operators.different)


def diff(
    a: Capture,
    b: Capture,
    *,
    tolerance: float = 0.0,
    num_maps: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diff:
    """Compares two captures.

    Args:
        a: taken for what is right.
        b: another layout, precision or version of the same.
        tolerance: relative Frobenius up to which a key counts as equal.
        num_maps: rows that differ, from the first, to get a map.
        progress: is told how many keys of how many are done.

    Returns:
        The differences.

    Raises:
        NotComparableError: they have no key in common, or tensors of one name have other shapes.
    """
    both = [name for name in a.keys if name in b]
    _require_comparable(a, b, both)
    rows: list[Row] = []
    num_found = 0
    for done, name in enumerate(both, start=1):
        row = _row(a, b, name, tolerance, with_map=num_found < num_maps)
        num_found += row.status != EQUAL
        rows.append(row)
        progress(done, len(both))
    only = tuple(name for name in a.keys if name not in b), tuple(name for name in b.keys if name not in a)
    return Diff(
        folders=(str(a.folder), str(b.folder)),
        layouts=(a.manifest.layout, b.manifest.layout),
        levels=(a.manifest.level, b.manifest.level),
        tolerance=tolerance,
        rows=tuple(rows),
        only=only,
        recipe=recipe_changes(a.manifest.recipe, b.manifest.recipe),
        missing=tuple(name for names in only for name in names if _should_be_in_both(name, a, b)),
        operators=diff_operators(a, b, tolerance=tolerance),
    )


def recipe_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[tuple[str, Any, Any], ...]:
    """The keys of two recipes that mean other maths: not how a run is spread, saved and reported."""
    x, y = flat(dict(a)), flat(dict(b))
    return tuple(
        (name, x.get(name), y.get(name))
        for name in sorted(x.keys() | y.keys())
        if x.get(name) != y.get(name) and is_maths(name)
    )


def _require_comparable(a: Capture, b: Capture, both: list[str]) -> None:
    if not both:
        steps = f"steps {list(a.manifest.steps)} and {list(b.manifest.steps)}"
        raise NotComparableError(
            f"{a.folder} and {b.folder} have no tensor in common ({steps}); capture the same steps"
        )
    for name in both:
        if a.shape(name) != b.shape(name):
            changed = "".join(
                f"\n  {key} = {x} in {a.folder}, {y} in {b.folder}"
                for key, x, y in recipe_changes(a.manifest.recipe, b.manifest.recipe)
            )
            raise NotComparableError(
                f"{name} has shape {list(a.shape(name))} in {a.folder} and {list(b.shape(name))} in {b.folder}: "
                f"the models or batches are others{changed}"
            )
    if not (a.has_elements and b.has_elements) and all(a.dtype(name) != b.dtype(name) for name in both):
        raise NotComparableError("hashes of tensors in other precisions cannot be compared: use --level tensors")


def _should_be_in_both(name: str, a: Capture, b: Capture) -> bool:
    step, kind, _ = split_key(name)
    is_recorded = step in a.manifest.steps and step in b.manifest.steps
    return kind in ALWAYS_THERE and is_recorded and a.manifest.only == b.manifest.only


def _row(a: Capture, b: Capture, name: str, tolerance: float, *, with_map: bool) -> Row:
    dtypes = tuple(str(side.dtype(name)).removeprefix("torch.") for side in (a, b))
    common = {"key": name, "dtypes": dtypes, "shape": a.shape(name)}
    if not (a.has_elements and b.has_elements):
        return _row_of_digests(a, b, name, common)
    x, y = a.read(name), b.read(name)
    why = why_at_odds(a, x, name) or why_at_odds(b, y, name)
    found = difference(x.tensor, y.tensor)
    is_equal = found.num_unequal == 0 or (found.relative <= tolerance and not found.num_nan[2])
    if not is_equal:
        why = why or "differs"
    if not why:
        return Row(**common, status=EQUAL, why="", difference=found)
    return Row(
        **common,
        status=DIFFERENT,
        why=why,
        difference=found,
        holders=(a.holder(name, found.at), b.holder(name, found.at)) if found.num_unequal else NOBODY,
        map=error_map(x.tensor, y.tensor) if with_map else [],
    )


def why_at_odds(side: Capture, whole: Whole, name: str) -> str:
    """What is wrong with a tensor of one capture by itself: replicas, holes, recomputation; empty: nothing."""
    if not whole.is_replicated:
        return f"ranks of {side.folder} that hold the same elements differ in their bits"
    if not whole.is_complete:
        return f"no rank of {side.folder} holds some of its elements"
    step, kind, module = split_key(name)
    before = key(step, FORWARD, module)
    if kind == RECOMPUTE and before in side:
        again, first = whole.tensor, side.read(before).tensor
        if not same_bits(again, first):
            return f"{side.folder} computed something else again than before"
    return ""


def _row_of_digests(a: Capture, b: Capture, name: str, common: dict[str, Any]) -> Row:
    (x, x_agrees), (y, y_agrees) = _digest(a, name), _digest(b, name)
    for side, agrees in ((a, x_agrees), (b, y_agrees)):
        if not agrees:
            return Row(
                **common, status=DIFFERENT, why=f"ranks of {side.folder} that hold the same elements differ in bits"
            )
    if x is None or y is None:
        return Row(**common, status=DIFFERENT, why="no rank holds some of its elements")
    if a.dtype(name) != b.dtype(name):
        return Row(**common, status=DIFFERENT, why="is in another precision, whose hash is another")
    if x.hash == y.hash:
        size = torch.Size(common["shape"]).numel()
        return Row(**common, status=EQUAL, why="", difference=Difference(size))
    both = (x.statistics, y.statistics) if x.statistics and y.statistics else None
    return Row(**common, status=DIFFERENT, why="hashes differ", statistics=both)


def _digest(side: Capture, name: str) -> tuple[Digest | None, bool]:
    if not side.has_elements:
        return side.digest(name)
    whole = side.read(name)
    if not whole.is_complete:
        return None, whole.is_replicated
    shape = tuple(whole.tensor.shape)
    starts_R = starts_of_box(shape, (0,) * len(shape), shape)
    return digest(whole.tensor, starts_R, with_statistics=True), whole.is_replicated
