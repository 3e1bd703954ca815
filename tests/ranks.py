"""Runs a test on several forked ranks. Whatever a rank raises is shown by the parent, the first failing rank first.

@ranks(2)
def test_something(tmp_path): ...       # runs in every rank, with torch.distributed initialized (gloo)
"""

import functools
from collections.abc import Callable

import torch

from drumline.comm.forked import ForkedRanks

torch.set_num_threads(1)  # ranks and the process of the tests share few cores


def run_ranks(num_ranks: int, body: Callable[[], None], timeout_s: float = 120.0) -> None:
    """Runs `body` in `num_ranks` forked processes and raises the first failure.

    Raises:
        AssertionError: a rank raised, died or did not finish in time; carries its traceback.
    """
    failures = ForkedRanks(num_ranks, body, timeout_s).wait()
    if failures:
        raise AssertionError("\n".join(failures))


def ranks(num_ranks: int, timeout_s: float = 120.0):
    """Decorates a test so that it runs on `num_ranks` forked ranks."""

    def decorate(test):
        @functools.wraps(test)
        def wrapped(*args, **kwargs):
            run_ranks(num_ranks, lambda: test(*args, **kwargs), timeout_s)

        return wrapped

    return decorate
