"""Operators of two captures held against each other, where both were captured at that level.

An operator that gets the same bits and gives others computes otherwise itself; one that gets others may only pass
them on.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from drumline.capture.keys import depth
from drumline.capture.operators import PHASES, Operator
from drumline.capture.reading import Capture

CUTS = ("tp", "cp", "ep")
"""Degrees that decide what of a module a rank computes."""


@dataclass(frozen=True)
class OperatorRow:
    """An operator that differs.

    Attributes:
        key: of it.
        source: line of the model that called it, in b.
        ranks: in a and in b.
        inputs_are_equal: it gets the same bits in both, so that the difference is its own.
        why: what differs, in words.
    """

    key: str
    source: str
    ranks: tuple[int, int]
    inputs_are_equal: bool
    why: str


@dataclass(frozen=True)
class OperatorDiff:
    """What became of a comparison of operators.

    Attributes:
        num_compared: that both have.
        different: in the order in which a step runs them.
        only: keys that only a, only b has.
        refused: why they were not compared; empty: they were.
    """

    num_compared: int = 0
    different: tuple[OperatorRow, ...] = ()
    only: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    refused: str = ""

    @property
    def culprit(self) -> OperatorRow | None:
        """The first that gets the same bits and gives others; else the first that differs."""
        own = next((row for row in self.different if row.inputs_are_equal), None)
        return own or next(iter(self.different), None)


def diff_operators(a: Capture, b: Capture, *, tolerance: float = 0.0) -> OperatorDiff | None:
    """Compares the operators of two captures.

    Args:
        a: taken for what is right.
        b: the same in another precision or version, or in a layout that cuts modules alike.
        tolerance: up to which mean and root mean square may be apart, over the latter; 0: every bit.

    Returns:
        The differences; None where one has no operators.
    """
    if not (a.has_operators and b.has_operators):
        return None
    x, y = (side.manifest.recipe["layout"] for side in (a, b))
    if any(x.get(name) != y.get(name) for name in CUTS):
        return OperatorDiff(
            refused=f"{a.manifest.layout} and {b.manifest.layout} cut modules in other places, so that ranks run other "
            f"operators"
        )
    mine, theirs = ({each.key: (each, rank) for rank, each in side.operators()} for side in (a, b))
    both = in_order(mine[key][0] for key in mine if key in theirs)
    rows = []
    for key in both:
        (one, one_rank), (other, other_rank) = mine[key], theirs[key]
        why = _why(one, other, tolerance)
        if why:
            rows.append(OperatorRow(key, other.source, (one_rank, other_rank), one.inputs == other.inputs, why))
    only = tuple(
        tuple(in_order(found[key][0] for key in found if key not in rest))
        for found, rest in ((mine, theirs), (theirs, mine))
    )
    return OperatorDiff(len(both), tuple(rows), (only[0], only[1]))


def in_order(operators: Iterable[Operator]) -> list[str]:
    """Keys in the order in which a step runs them: micro-batch by micro-batch, forwards, then again, then backwards.

    Args:
        operators: those of a rank in their order.

    Returns:
        Their keys.
    """
    return [each.key for each in sorted(operators, key=_place)]


def _place(each: Operator) -> tuple:
    is_backward = each.phase == PHASES[-1]
    return each.step, PHASES.index(each.phase), each.microbatch, depth(each.module, backwards=is_backward)


def _why(a: Operator, b: Operator, tolerance: float) -> str:
    if a.shape != b.shape:
        return f"is of shape {list(a.shape)} in a and {list(b.shape)} in b"
    x, y = a.digest.statistics, b.digest.statistics
    assert x is not None, "operators have statistics"
    assert y is not None, "operators have statistics"
    if a.dtype != b.dtype:
        words = f"is {a.dtype} in a and {b.dtype} in b"
    elif a.digest.hash == b.digest.hash:
        return ""
    else:
        words = "bits differ"
    has_same_odd = (x.num_nan, x.num_infinite) == (y.num_nan, y.num_infinite)
    if tolerance and has_same_odd and max(abs(x.rms - y.rms), abs(x.mean - y.mean)) <= tolerance * x.rms:
        return ""
    nan = f", not-a-numbers {x.num_nan:,.0f} and {y.num_nan:,.0f}" if x.num_nan or y.num_nan else ""
    return (
        f"{words}; root mean square {x.rms:.6g} and {y.rms:.6g}, largest {x.largest_magnitude:.6g} and "
        f"{y.largest_magnitude:.6g}{nan}"
    )


@dataclass(frozen=True)
class Found:
    """The first operator of a module that differs on the same inputs of the module.

    Attributes:
        key: of it, in b where b has it.
        source: line of the model that called it.
        rank: that ran it.
        why: in words.
    """

    key: str
    source: str
    rank: int
    why: str


def first_difference(a: Capture, b: Capture, module: str, step: int) -> Found | None:
    """Finds where two runs of a module on the same inputs part.

    Args:
        a: has operators of the module.
        b: has them, too, in a layout that cuts modules alike.
        module: logical name.
        step: of both.

    Returns:
        The first operator, in the order of a step, that gives others or that only one of the two runs; None: all agree.
    """
    mine, theirs = (
        {each.key: (each, rank) for rank, each in side.operators() if each.step == step and _lies_in(each, module)}
        for side in (a, b)
    )
    phases = {each.phase for each, _ in mine.values()} & {each.phase for each, _ in theirs.values()}
    for key in in_order(each for each, _ in theirs.values() if each.phase in phases):
        each, rank = theirs[key]
        if key not in mine:
            without = in_order(one for name, (one, _) in mine.items() if name not in theirs and one.phase in phases)
            instead = f"; a runs {without[0]} instead" if without else ""
            return Found(key, each.source, rank, f"a does not run it{instead}")
        why = _why(mine[key][0], each, 0.0)
        if why:
            gets = "it gets the same bits" if mine[key][0].inputs == each.inputs else "it gets other bits, from outside"
            return Found(key, each.source, rank, f"{why}; {gets}")
    left = in_order(each for name, (each, _) in mine.items() if name not in theirs and each.phase in phases)
    if left:
        each, rank = mine[left[0]]
        return Found(left[0], each.source, rank, "b does not run it")
    return None


def _lies_in(each: Operator, module: str) -> bool:
    name = each.module.partition("#")[0]
    return name == module or name.startswith(f"{module}.")
