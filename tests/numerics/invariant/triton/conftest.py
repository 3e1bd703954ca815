"""Where the Triton kernels run here: on a GPU, or on CPU tensors under Triton's interpreter.

The interpreter is chosen before Triton is loaded (`TRITON_INTERPRET=1`), so `../test_triton.py` runs this folder in a
process of its own; within other processes it is skipped.
"""

import importlib.util

import pytest
import torch
from tests.numerics.invariant.triton.here import IS_INTERPRETED

from drumline.numerics.invariant import native


@pytest.fixture
def device(monkeypatch):
    """The device whose tensors Triton's kernels take; no other kernel may run."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    if not IS_INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a GPU, or a process under TRITON_INTERPRET=1")
    found = "cpu" if IS_INTERPRETED else "cuda"

    def refused(module):
        raise AssertionError(f"the C++ kernel of {module.__name__} was asked for")

    monkeypatch.setattr(native, "_OF_TRITON", found)
    monkeypatch.setattr(native, "_built", refused)
    return found
