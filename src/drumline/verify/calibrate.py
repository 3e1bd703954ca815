"""Makes a baseline: a recipe made small, its steps in fp64, and limits from variants that are legitimate.

A variant computes the same maths in another order: other micro-batches and layouts, another attention, recomputation.
What rounding leaves of that is what a gate must let pass, with a margin; everything else it must not.
"""

import functools
import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline import models
from drumline.capture.baseline import TIER_OF, Baseline, Limit, deviation, limit_of, statistics_of
from drumline.capture.files import RankFile, read, write
from drumline.capture.forcing import read_routing
from drumline.capture.keys import BACKWARD, CHOICE, FORWARD, INIT, ROUTER, ROUTING, split_key
from drumline.capture.ratio import error_of, error_ratio
from drumline.capture.reading import Capture
from drumline.comm import read_place
from drumline.comm.forked import run_forked
from drumline.numerics import kernels
from drumline.optimizers import learning_rate
from drumline.recipe import Layout, Recipe, problems
from drumline.recipe.errors import DrumlineError
from drumline.train.captured import Wanted, capture_rank
from drumline.verify.reference import Protocol, exact, ordinary
from drumline.verify.shrink import shrink

TIMEOUT_S = 300.0

Variant = tuple[str, dict[str, dict[str, Any]]]
"""A name, and values by section and key."""

VARIANTS: tuple[Variant, ...] = (
    ("one rank", {}),
    ("micro-batch 2", {"data": {"micro_batch": 2}}),
    ("whole batch", {"data": {"micro_batch": 8}}),
    ("torch's attention", {"model": {"attention": "sdpa"}}),
    ("recomputation", {"memory": {"activation_checkpointing": "full"}}),
    ("loss in chunks", {"memory": {"loss_chunk_tokens": 24}}),
    ("dp2", {"layout": {"dp": 2}}),
    ("fsdp2", {"layout": {"fsdp": 2}}),
    ("tp2", {"layout": {"tp": 2}}),
    ("tp2 no-sp", {"layout": {"tp": 2, "sequence_parallel": False}}),
    ("cp2", {"layout": {"cp": 2}}),
    ("pp2", {"layout": {"pp": 2}}),
)
LAYOUTS = tuple(Layout.model_validate(values["layout"]) for _, values in VARIANTS if "layout" in values)


def calibrate(recipe: Recipe, folder: Path, *, num_steps: int = 2, notify: Callable[[str], None]) -> Baseline:
    """Makes a baseline. Ranks are forked from this process, which computes with one thread from then on.

    Args:
        recipe: of any size; it is made small, and its tokens are made up.
        folder: a new one, that gets the baseline.
        num_steps: that are trained.
        notify: gets a line a stage.

    Returns:
        The baseline.

    Raises:
        DrumlineError: the recipe cannot run in any variant, or ranks failed.
    """
    small = small_recipe(recipe)
    folder.mkdir(parents=True, exist_ok=True)
    kernels.available()  # built here once, not by every rank at a time
    precisions = ("fp32", "bf16")
    with tempfile.TemporaryDirectory(prefix="drumline-calibrate-") as name:
        scratch = Path(name)
        notify("one device in fp64, fp32 and bf16")
        run_forked(
            1, functools.partial(_write_one_device, small, folder, scratch, num_steps), TIMEOUT_S, "one device failed"
        )
        found = RankFile(folder / "exact.safetensors")
        truth = {part.key: found.part(index).tensor for index, part in enumerate(found.parts)}
        errors = {precision: _errors(truth, scratch, precision) for precision in precisions}
        measured: dict[str, dict[str, list[tuple[float, str, str]]]] = {}
        for precision in precisions:
            for variant, values in VARIANTS:
                changed = _with(small, {**values, "precision": {"compute": precision}})
                if problems(changed, world_size=changed.layout.num_ranks):
                    continue
                notify(f"{precision}, {variant}")
                out = scratch / hashlib.blake2b(f"{precision}{variant}".encode(), digest_size=6).hexdigest()
                routing = folder if _has_experts(small) else None
                wanted = Wanted(tuple(range(1, num_steps + 1)), "tensors", (), out, routing=routing)
                body = functools.partial(_capture, changed, wanted)
                run_forked(changed.layout.num_ranks, body, TIMEOUT_S, f"{variant} failed")
                _measure(Capture(out), truth, errors[precision], precision, variant, measured)
    limits = {
        tier: {kind: limit_of(tier, values) for kind, values in kinds.items()} for tier, kinds in measured.items()
    }
    made = Baseline(
        folder=folder,
        recipe=small.model_dump(mode="json"),
        steps=tuple(range(1, num_steps + 1)),
        errors=errors,
        limits=limits,
        variants=tuple(name for name, _ in VARIANTS),
        exact=found,
    )
    made.write()
    return made


def small_recipe(recipe: Recipe) -> Recipe:
    """A recipe made small for all variants, of tokens that are made up, in fp32 on one rank.

    Args:
        recipe: of any size.

    Returns:
        The small recipe.

    Raises:
        DrumlineError: it cannot run on one rank.
    """
    plain = _with(recipe, {"layout": Layout().model_dump(), "precision": {"compute": "fp32"}})
    legal = [layout for layout in LAYOUTS if not _breaks(plain, layout)]
    small = shrink(plain, [Layout(), *legal]).recipes[0]
    small = _with(
        small,
        {
            "data": {"micro_batch": 1},
            "schedule": {"warmup_steps": 0},
            "run": {"validation_batches": 0, "validate_every": 0, "timeline": 0},
            "memory": {"activation_checkpointing": "none"},
        },
    )
    if found := problems(small, world_size=1):
        raise DrumlineError(f"the recipe cannot be calibrated on one rank:\n  {found[0]}")
    return small


def _breaks(recipe: Recipe, layout: Layout) -> bool:
    changed = _with(recipe, {"layout": layout.model_dump(), "data": {"micro_batch": 1}})
    return any(found.key.startswith(("layout", "model")) for found in problems(changed))


def _with(recipe: Recipe, values: dict[str, dict[str, Any]]) -> Recipe:
    """The recipe with other values, validated as if they had been typed."""
    document = recipe.model_dump(mode="json")
    for section, changes in values.items():
        document[section] = {**document[section], **changes}
    return Recipe.model_validate(document)


def protocol(recipe: Recipe, num_steps: int) -> Protocol:
    """As the loop trains, and as a recorder records."""

    def rate(step: int) -> float:
        section = recipe.optimizer
        return learning_rate(step - 1, peak=section.lr, num_steps=recipe.run.steps, schedule=recipe.schedule)

    steps = range(1, num_steps + 1)
    return Protocol(models.initialize, rate, num_steps, steps, (FORWARD, BACKWARD, ROUTER, CHOICE), has_moments=True)


def _write_one_device(recipe: Recipe, folder: Path, scratch: Path, num_steps: int) -> None:
    how = protocol(recipe, num_steps)
    kept = [part for part in exact(recipe, how) if split_key(part.key)[1] != ROUTING]
    write(kept, folder / "exact.safetensors")
    if _has_experts(recipe):  # where rounding moved a token to another expert, all else would be another model's
        how = replace(how, forced=read_routing(folder))
    for precision in ("fp32", "bf16"):
        one = _with(recipe, {"precision": {"compute": precision}})
        for index, parts in enumerate(ordinary(one, how)):
            write(parts, scratch / f"{precision}-{index}.safetensors")


def _has_experts(recipe: Recipe) -> bool:
    """Whether any layer routes tokens."""
    return recipe.model.moe is not None


def _capture(recipe: Recipe, wanted: Wanted) -> None:
    capture_rank(recipe, read_place(), wanted)


def _errors(truth: dict[str, Any], scratch: Path, precision: str) -> dict[str, float]:
    """The largest error of one device's ways, by key."""
    worst = dict.fromkeys(truth, 0.0)
    for path in sorted(scratch.glob(f"{precision}-*.safetensors")):
        for part in read(path):
            if part.key in truth:
                worst[part.key] = max(worst[part.key], error_of(part.tensor, truth[part.key]))
    return worst


def _measure(
    capture: Capture,
    truth: dict[str, Any],
    errors: dict[str, float],
    precision: str,
    variant: str,
    measured: dict[str, dict[str, list[tuple[float, str, str]]]],
) -> None:
    tier = TIER_OF[precision]
    for name, true in truth.items():
        kind = split_key(name)[1]
        if name not in capture or kind in (INIT, CHOICE):
            continue
        mine = capture.read(name).tensor
        ratio = error_ratio(error_of(mine, true), true, errors[name], precision)
        off = deviation(statistics_of(mine), statistics_of(true))
        for where, value in ((tier, ratio), (f"C {precision}", off)):
            measured.setdefault(where, {}).setdefault(kind, []).append((value, variant, name))


def limits_in_words(limits: Mapping[str, Mapping[str, Limit]]) -> Sequence[tuple[str, str, str, str]]:
    """Rows of tier, kind, limit and reason."""
    return [
        (tier, kind, f"{limit.limit:.3g}", limit.reason)
        for tier, kinds in sorted(limits.items())
        for kind, limit in kinds.items()
    ]
