"""Operators that give the same bits each time they run.

Some of torch's have a fast form that adds in whatever order threads happen to arrive, on CUDA above all (atomics).
Asked for determinism, torch takes another form, or refuses an operator that has none.
Source: PyTorch's notes on reproducibility, https://docs.pytorch.org/docs/stable/notes/randomness.html.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

CUBLAS: Mapping[str, str] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What cuBLAS must find in the environment, before its first product, to repeat its bits on several streams."""


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Lets torch take deterministic operators only, while it lasts.

    Args:
        wanted: False: nothing changes.

    Yields:
        Nothing.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills, searches = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # Filling new memory with NaN finds programs that read before they write; it changes no bits of one that does not.
    memory.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False  # it times algorithms, and takes whichever was faster today
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fills
        torch.backends.cudnn.benchmark = searches
