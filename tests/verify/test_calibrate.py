"""Calibration: a small recipe for all variants, and a baseline that its own variants pass."""

import subprocess
import sys

import pytest
from tests.mutants.gated import judged
from tests.train.runs import environment

from drumline.capture.baseline import read_baseline
from drumline.recipe import load, problems
from drumline.verify.calibrate import VARIANTS, _with, small_recipe

SMALLER = ["model.num_layers=2", "model.dim=16", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=8"]


@pytest.mark.parametrize("name", ["llama3-debug", "llama3-8b", "qwen3-moe-debug", "deepseek-v3-debug"])
def test_a_recipe_made_small_runs_in_every_variant_that_the_full_one_has(name):
    small = small_recipe(load(name))
    assert small.model.dim <= 64
    assert not problems(small, world_size=1)
    runnable = [
        variant
        for variant, values in VARIANTS
        if not problems(changed := _with(small, values), world_size=changed.layout.num_ranks)
    ]
    assert len(runnable) >= 9


@pytest.mark.slow
def test_the_command_makes_a_baseline_that_the_gate_takes(tmp_path):
    command = [sys.executable, "-m", "drumline", "numerics", "calibrate", "llama3-debug", *SMALLER, "data.seq_len=16"]
    out = tmp_path / "base"
    done = subprocess.run(
        [*command, "--steps", "1", "--out", str(out)], env=environment(), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "times the worst variant" in done.stdout
    assert read_baseline(out).steps == (1,)
    assert judged(tmp_path / "c", ("layout=fsdp2",), baseline=out, steps=(1,)).passes
