"""Numbers too small for a full significand, which a CPU computes with at a fraction of its speed.

Once attention has learned to look away, most of its weights and their gradients are that small: steps slow down as
training goes on, though nothing but the weights has changed. As zeros they cost nothing, and what is lost is below
1.2e-38, the smallest normal number of fp32 and of bf16.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Treats denormal numbers as zeros on the CPU; nothing changes where the processor cannot.

    It holds for the calling thread and for threads started from it while it lasts, so it must be entered before torch
    starts its pool, at the first operator that is worth several threads.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
