"""Captures of the stored baseline's recipe, judged against it."""

from collections.abc import Sequence
from pathlib import Path

from tests.ranks import run_ranks

from drumline.capture.baseline import read_baseline
from drumline.capture.gate import Verdict, gate
from drumline.capture.reading import Capture
from drumline.comm import read_place
from drumline.recipe import check, load
from drumline.train.captured import Wanted, capture_rank

STORED = Path(__file__).parents[1] / "baselines" / "llama3-debug"


def record(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    baseline: Path = STORED,
    level: str = "tensors",
    steps: tuple[int, ...] = (1, 2),
) -> Capture:
    """A capture of the baseline's recipe, on forked ranks."""
    recipe = load(str(baseline / "recipe.json"), overrides)
    check(recipe, world_size=recipe.layout.num_ranks)
    wanted = Wanted(steps, level, (), folder)
    run_ranks(recipe.layout.num_ranks, lambda: capture_rank(recipe, read_place(), wanted))
    return Capture(folder)


def judged(folder: Path, overrides: Sequence[str] = (), **options) -> Verdict:
    """The verdict on such a capture."""
    baseline = options.get("baseline", STORED)
    return gate(record(folder, overrides, **options), read_baseline(baseline))
