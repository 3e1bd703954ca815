"""Captures of a model small enough for a test, on forked ranks, of tokens that are made up."""

from collections.abc import Callable
from pathlib import Path

from tests.ranks import run_ranks

from drumline.capture.reading import Capture
from drumline.comm import read_place
from drumline.recipe import check, load
from drumline.train.captured import Wanted, capture_rank

SMALL = (
    "model.num_layers=2",
    "model.dim=32",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.hidden_dim=32",
    "model.vocab_size=68",
    "model.init_std=0.18",
    "data.sources=made-up",
    "data.seq_len=32",
    "data.global_batch=8",
    "data.micro_batch=1",
    "optimizer.eps=1e-3",
    "optimizer.lr=0.01",
    "schedule.warmup_steps=0",
    "run.threads=1",
    "run.device=cpu",
)


def recipe(*overrides: str, base: str = "llama3-debug"):
    """The resolved recipe; later overrides win."""
    resolved = load(base, [*SMALL, *overrides])
    check(resolved, world_size=resolved.layout.num_ranks)
    return resolved


def capture(
    folder: Path,
    *overrides: str,
    steps: tuple[int, ...] = (1, 2),
    level: str = "tensors",
    only: tuple[str, ...] = (),
    base: str = "llama3-debug",
    before: Callable[[], None] = lambda: None,
    **further,
) -> Capture:
    """Records on forked ranks; `before` is called first in every rank."""
    resolved = recipe(*overrides, base=base)
    wanted = Wanted(steps, level, only, folder, **further)

    def body() -> None:
        before()
        capture_rank(resolved, read_place(), wanted)

    run_ranks(resolved.layout.num_ranks, body)
    return Capture(folder)
