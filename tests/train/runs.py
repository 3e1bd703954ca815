"""Runs of a model small enough for a test: in forked ranks (fast), or as a user starts them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks

from drumline.comm import read_place
from drumline.recipe import Recipe, check, load
from drumline.train import run_rank
from drumline.train.journal import Journal
from drumline.train.records import Record, StepRecord

TINY = (
    "model.num_layers=2",
    "model.dim=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.hidden_dim=128",
    "data.seq_len=128",
    "data.micro_batch=1",
    "schedule.warmup_steps=2",
    "run.validation_batches=1",
    "metrics.peak=1",
    "run.threads=1",
)


def recipe(run_dir: Path, *overrides: str) -> Recipe:
    """The resolved recipe of a tiny run; later overrides win."""
    resolved = load("llama3-debug", [*TINY, f"run.dir={run_dir}", *overrides])
    check(resolved, world_size=resolved.layout.num_ranks)
    return resolved


def train_here(run_dir: Path, *overrides: str, kill_after: int = 0, before: Callable[[], None] = lambda: None) -> None:
    """Runs on forked ranks to the end, or until every rank kills itself once metrics.jsonl has `kill_after` steps.

    `before` is called first in every rank.

    Raises:
        AssertionError: a rank raised or, unless it was to be killed, died.
    """
    resolved = recipe(run_dir, *overrides)

    def body() -> None:
        before()
        if kill_after:
            _kill_self_after(kill_after, run_dir, resolved.checkpoint.every)
        run_rank(resolved, read_place())

    if not kill_after:
        run_ranks(resolved.layout.num_ranks, body)
        return
    with pytest.raises(AssertionError, match=r"SIGKILL|killed|Connection closed"):
        run_ranks(resolved.layout.num_ranks, body)


def command(run_dir: Path, *overrides: str) -> list[str]:
    """The command line of a tiny run."""
    return [sys.executable, "-m", "drumline", "train", "llama3-debug", *TINY, f"run.dir={run_dir}", *overrides]


def environment(**extra: str) -> dict[str, str]:
    """The test's environment without anything that places a rank."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **extra}


def train(run_dir: Path, *overrides: str, timeout_s: float = 120, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        command(run_dir, *overrides), env=environment(**extra), capture_output=True, text=True, timeout=timeout_s
    )


def interrupt_after(run_dir: Path, step: int, number: int, *overrides: str, timeout_s: float = 120) -> tuple[int, str]:
    """Starts the command, sends its first process a signal once metrics.jsonl has a step, and waits for its end.

    Returns:
        Exit code and output.
    """
    process = subprocess.Popen(
        command(run_dir, *overrides),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + timeout_s
    try:
        while len(steps(run_dir)) < step:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"ended before step {step}: {process.communicate(timeout=10)[0]}")
            time.sleep(0.002)
        os.kill(process.pid, number)
        out = process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, out


def rows(run_dir: Path, kind: str | None = None) -> list[dict]:
    """The whole rows of metrics.jsonl, of one kind if given."""
    path = run_dir / "metrics.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # being written
    return [row for row in found if kind is None or row["kind"] == kind]


def steps(run_dir: Path) -> list[tuple[int, str, str]]:
    """(step, loss, gradient norm) of each step row, the numbers as hex."""
    return [(row["step"], row["loss_hex"], row["grad_norm_hex"]) for row in rows(run_dir, "step")]


def tensors(commit: Path) -> dict[str, torch.Tensor]:
    """Every logical tensor of a commit, weights and optimizer states."""
    from drumline.checkpoint import open_commit

    return dict(open_commit(commit).tensors())


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Holds two sets of logical tensors against each other, bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def save_when_loaded(folder: Path) -> None:
    """Makes a run of this process save what it took up from a commit, before it trains, as a commit in `folder`.

    For `before` of `train_here`: the patch is forgotten with the rank.
    """
    from drumline.checkpoint import Saver
    from drumline.train import run

    right = run.set_up

    def set_up(recipe, world, *rest):
        parts = right(recipe, world, *rest)
        with Saver(folder, rank=world.rank, world_size=world.size, asynchronous=False) as saver:
            saver.save(parts.first_step, parts.pieces(), {})
        return parts

    run.set_up = set_up


def _kill_self_after(step: int, run_dir: Path, every: int) -> None:
    """Lets this process die with the row of a step, or once another rank has written it. The commits that were due by
    then are waited for, since how far a commit came in the background is not what the tests are about.
    """
    due = run_dir / "checkpoints" / f"step-{(step - 1) // max(1, every) * every:08d}"

    def die() -> None:
        deadline = time.monotonic() + 20
        while step > every > 0 and not due.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    def die_with_the_others() -> None:
        while len(steps(run_dir)) < step:
            time.sleep(0.001)
        die()

    write = Journal.observe

    def observe(self: Journal, record: Record) -> None:
        write(self, record)
        if isinstance(record, StepRecord) and record.step == step:
            die()

    Journal.observe = observe  # this process is a fork that ends with the run
    threading.Thread(target=die_with_the_others, daemon=True).start()
