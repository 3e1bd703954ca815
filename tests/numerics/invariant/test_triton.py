"""The Triton kernels, each kind of run in a process of its own: Triton chooses its interpreter when it is loaded."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drumline.numerics import invariant
from drumline.numerics.invariant import native
from drumline.numerics.kernels.build import KernelError

FOLDER = Path(__file__).parent / "triton"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def assert_passes(what, environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(what)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_kernels_are_right_and_invariant_on_a_gpu_or_under_the_interpreter():
    assert_passes(FOLDER, {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_kernels_compile_for_a_gpu():
    assert_passes(FOLDER / "test_compiles.py", {"TRITON_INTERPRET": "0"})


def test_without_triton_an_operator_says_what_to_install(monkeypatch):
    monkeypatch.setattr(native, "_OF_TRITON", "cpu")
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("drumline.numerics.invariant.triton")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(KernelError, match=r"triton is not installed\n.*pip install 'drumline\[triton\]'"):
        invariant.linear(torch.ones(2, 3), torch.ones(4, 3))


def test_other_dtypes_need_no_triton(monkeypatch):
    monkeypatch.setattr(native, "_OF_TRITON", "cpu")
    monkeypatch.setitem(sys.modules, "triton", None)
    x = torch.ones(2, 3, dtype=torch.float64)
    assert torch.equal(invariant.linear(x, x), torch.full((2, 2), 3.0, dtype=torch.float64))
