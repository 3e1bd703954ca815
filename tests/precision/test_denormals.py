"""Denormal numbers as zeros."""

import subprocess
import sys

import torch

from drumline.precision import flush_denormals

TINY = 1e-39  # below 2^-126


def test_denormals_are_zeros_inside_and_numbers_again_after():
    tiny = torch.full((64,), TINY)
    with flush_denormals():
        assert (tiny * 1.0).count_nonzero() == 0
    assert (tiny * 1.0).count_nonzero() == 64


def test_every_thread_of_the_pool_flushes():
    program = f"""
import torch
from drumline.precision import flush_denormals
torch.set_num_threads(2)
with flush_denormals():
    tiny = torch.full((1 << 22,), {TINY})
    print(int((tiny * 1.0).count_nonzero()))
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "0"


def test_a_step_flushes(tmp_path):
    from tests.train.runs import train_here

    seen = tmp_path / "seen"
    real = torch.optim.AdamW.step

    def record():
        def step(self, *args, **kwargs):
            seen.write_text(str(int((torch.full((64,), TINY) * 1.0).count_nonzero())))
            return real(self, *args, **kwargs)

        torch.optim.AdamW.step = step

    train_here(tmp_path / "run", "run.steps=1", before=record)
    assert seen.read_text() == "0"
