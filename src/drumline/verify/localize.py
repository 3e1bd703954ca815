"""Finds the module, and in it the operator, in which two captures part: the second is run again on the first's values.

    own(m)   = how far m's output, run as in b on a's recorded inputs, is from a's recorded output
    scale(m) = how far it moves when those inputs move by one rounding; at least one rounding of the output
    own = 0: the same. own <= LIMIT scale: rounding. More: m computes otherwise itself, whatever came before it.

Outputs and gradients of all modules, gradients of parameters, weights and moments are a's (teacher forcing), so that
nothing is passed on. The first module that computes otherwise is run once more with its operators recorded, and held
against those of a: recorded ones, or those of a's recipe run again, where that gives a's values bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from drumline.capture.diff import diff
from drumline.capture.keys import BACKWARD, FORWARD, GRADIENT, INIT, LOSS, NORM, OPTIMIZER, RECOMPUTE, WEIGHT, split_key
from drumline.capture.operator_diff import CUTS, Found, first_difference
from drumline.capture.ratio import EPS
from drumline.capture.reading import Capture, CaptureError
from drumline.capture.watch import module_of
from drumline.recipe.sections import Recipe
from drumline.train.captured import Wanted

LIMIT = 16.0
"""Times the scale. Layouts, kernels and recomputation came to 1.7; faults to thousands."""

SAME, ROUNDING, DIFFERS = "same", "rounding", "differs"
_STATE = (NORM, OPTIMIZER, WEIGHT)
_COMPUTED = (FORWARD, RECOMPUTE, LOSS, BACKWARD, GRADIENT)

Run = Callable[[Recipe, Wanted], None]
"""Records on as many ranks as the recipe's layout needs."""


@dataclass(frozen=True)
class Own:
    """What a tensor's own computation differs by.

    Attributes:
        key: of the tensor.
        verdict: `same`, `rounding` or `differs`.
        relative: Frobenius, to what a recorded.
        ratio: over what rounding of the inputs explains.
        rank: of b, that holds the element that differs most; -1: none does.
        is_passed_on: the captures differ here, and on a's inputs there is no difference beyond rounding.
    """

    key: str
    verdict: str
    relative: float
    ratio: float
    rank: int
    is_passed_on: bool


@dataclass(frozen=True)
class Localized:
    """Where two captures part.

    Attributes:
        step: that was run again.
        tensors: that differ in the captures or on a's values, in the order of a step.
        origin: key of the first whose own computation differs; empty: rounding explains all.
        module: that computes it; empty: none does, as for an optimizer state.
        operator: first that differs in the module; None: it was not looked for, or none does.
        why_no_operator: in words, where that is so.
        notes: what else must be known.
    """

    step: int
    tensors: tuple[Own, ...]
    origin: str
    module: str
    operator: Found | None
    why_no_operator: str
    notes: tuple[str, ...]


def localize(a: Capture, b: Capture, run: Run, scratch: Path, *, source: str, command: str = "") -> Localized:
    """Runs b's recipe again on a's values and judges what differs.

    Args:
        a: taken for what is right; with elements of all modules.
        b: differs from it.
        run: records.
        scratch: an empty folder, for captures that are not kept.
        source: digest of the code that runs.
        command: how a is captured again, for messages.

    Returns:
        Where they part.

    Raises:
        CaptureError: a lacks what is needed.
    """
    _require_values(a, command)
    plain = diff(a, b)
    parted = {row.key for row in plain.different}
    steps = sorted({split_key(name)[0] or 1 for name in (*parted, *plain.missing)})
    step = next((each for each in a.manifest.steps if each in b.manifest.steps and steps and each >= steps[0]), 0)
    if not step:
        return Localized(0, (), "", "", None, "nothing differs", ())
    before = min(a.manifest.steps)
    if step > before and not {step - 1} <= set(a.manifest.steps):
        raise CaptureError(f"{a.folder} lacks the weights before step {step}: capture steps {before}-{step}")
    notes = _notes(a, b, source)
    recipe = Recipe.model_validate(dict(b.manifest.recipe))
    unit = max(EPS.get(side.manifest.recipe["precision"]["compute"], EPS["fp32"]) for side in (a, b))
    has_choices = any("/choice/" in name for name in a.keys)
    taught = Wanted(
        (step,), "tensors", (), scratch / "forced", routing=a.folder if has_choices else None, teacher=a.folder
    )
    run(recipe, taught)
    run(recipe, replace(taught, folder=scratch / "noisy", noise=unit))
    tensors = _judge(a, Capture(taught.folder), Capture(scratch / "noisy"), parted, step, unit)
    origin = _origin(tensors, step)
    if not origin:
        return Localized(step, tensors, "", "", None, "rounding explains what differs", notes)
    kind, name = split_key(origin)[1:]
    module = module_of(name) if kind not in (LOSS, NORM, OPTIMIZER, WEIGHT) else ""
    if not module:
        return Localized(step, tensors, origin, "", None, f"no module computes {origin}", notes)
    operators = replace(taught, level="ops", only=(module,), folder=scratch / "operators", teaches_state=kind != INIT)
    found, why = _operator(a, recipe, operators, run, scratch, source, command)
    return Localized(step, tensors, origin, module, found, why, notes)


def _require_values(a: Capture, command: str) -> None:
    if not a.has_elements or a.manifest.only not in ((), ("*",)):
        raise CaptureError(
            f"{a.folder} does not hold what all modules got (level {a.manifest.level}, only "
            f"{list(a.manifest.only) or 'all'})\n  try: {command or 'drumline numerics capture RECIPE'}"
        )


def _notes(a: Capture, b: Capture, source: str) -> tuple[str, ...]:
    notes = []
    for side, name in ((a, "a"), (b, "b")):
        made = side.manifest.environment
        if made.get("source") != source:
            revision = made.get("revision") or "unknown"
            notes.append(
                f"{name} was captured by other code (drumline {made.get('drumline', '?')}, revision {revision}); "
                "what runs here is the present code"
            )
    return tuple(notes)


def _judge(a: Capture, forced: Capture, noisy: Capture, parted: set[str], step: int, unit: float) -> tuple[Own, ...]:
    moved = {row.key: row.difference.relative for row in diff(forced, noisy).rows if row.difference is not None}
    found = []
    for row in diff(a, forced).rows:
        at = split_key(row.key)[0]
        if at not in (step - 1, step) or row.difference is None:
            continue
        relative = row.difference.relative
        ratio = relative / max(unit, moved.get(row.key, 0.0))
        is_at_odds = row.why not in ("", "differs") or row.difference.num_nan[2] > 0
        verdict = SAME if not row.difference.num_unequal else ROUNDING
        if is_at_odds or (verdict == ROUNDING and not ratio <= LIMIT):
            verdict = DIFFERS
        if verdict != SAME or row.key in parted:
            passed_on = row.key in parted and verdict != DIFFERS
            found.append(Own(row.key, verdict, relative, ratio, row.holders[1][0], passed_on))
    return tuple(found)


def _origin(tensors: tuple[Own, ...], step: int) -> str:
    """The first that differs by itself; the state that a later step begins with was made by steps before."""
    own = [each.key for each in tensors if each.verdict == DIFFERS]
    computed = [name for name in own if split_key(name)[1] in _COMPUTED or (split_key(name)[1] == INIT and step == 1)]
    # The norm, moments and weights follow from the run's own gradients: they are to blame only where those are right.
    return next(iter(computed or [name for name in own if split_key(name)[1] in _STATE]), "")


def _operator(
    a: Capture, recipe: Recipe, wanted: Wanted, run: Run, scratch: Path, source: str, command: str
) -> tuple[Found | None, str]:
    theirs, mine = a.manifest.recipe["layout"], recipe.layout
    if any(theirs[name] != getattr(mine, name) for name in CUTS):
        return None, (
            f"{a.manifest.layout} and {mine} cut modules in other places, so that ranks run other operators\n"
            f"  to find it, capture a in {mine}, or b in {a.manifest.layout}"
        )
    if recipe.run.compile or a.manifest.recipe["run"]["compile"]:
        return None, "operators inside compiled blocks cannot be seen: capture both with run.compile=false"
    run(recipe, wanted)
    module, reference = wanted.only[0], a
    if not a.has_operators:
        again = replace(wanted, folder=scratch / "again", teaches_state=True)
        run(Recipe.model_validate(dict(a.manifest.recipe)), again)
        reference = Capture(again.folder)
        same = {row.key for row in diff(a, reference).rows if not row.why}
        of_module = [name for name in reference.keys if split_key(name)[1] in (FORWARD, BACKWARD, GRADIENT)]
        if not set(of_module) <= same:
            other = a.manifest.environment
            return None, (
                f"the present code in a's recipe does not give what a recorded of {module}, so a's operators cannot be "
                f"run again\n  with a's code (revision {other.get('revision') or 'unknown'}), then localize again: "
                f"{command} --level ops --only '*'"
            )
    found = first_difference(reference, Capture(wanted.folder), module, wanted.steps[0])
    return found, "" if found else f"no operator of {module} differs: it is told apart by its gradients' sums alone"
