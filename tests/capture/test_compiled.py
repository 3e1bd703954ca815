"""A compiled block is captured at its border: outputs, the gradients of outputs, and all that the optimizer has."""

import re
import subprocess
import sys

import pytest
from tests.capture.runs import SMALL
from tests.train.runs import environment

from drumline.capture.diff import diff
from drumline.capture.reading import Capture

WORDS = (*SMALL, "data.global_batch=2", "run.validation_batches=0")


def captured(folder, *overrides):
    """By a process of its own: ranks that are forked after a compiler ran wait for its threads."""
    words = ["numerics", "capture", "llama3-debug", *WORDS, *overrides, "--steps", "1", "--level", "tensors"]
    command = [sys.executable, "-m", "drumline", *words, "--out", str(folder)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return Capture(folder)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_are_captured_at_their_borders(recompute, tmp_path):
    words = (f"memory.activation_checkpointing={recompute}",)
    plain, compiled = captured(tmp_path / "plain", *words), captured(tmp_path / "compiled", *words, "run.compile=true")
    inside = {key for key in plain.keys if re.search(r"/(forward|backward|recompute)/layers\.\d+\.", key)}
    assert inside
    assert set(compiled.keys) == set(plain.keys) - inside
    assert {"1/forward/layers.0", "1/forward/layers.1", "1/backward/layers.0"} <= set(compiled.keys)
    found = diff(plain, compiled, tolerance=1e-4)
    assert found.is_equal, (found.first, found.different[0].difference)
