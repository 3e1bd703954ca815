"""Runs an operator whole and in other circumstances, and counts the elements whose bits differ.

What is compared: rows of a batch against the same rows alone, in batches of other sizes and at other places (`batch`,
`position`), a sum over rows against the same sum by chunks (`chunk`), everything against itself with other numbers of
threads (`threads`).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BATCHES = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 100)
THREADS = (2, 3, 4)

Call = Callable[..., Tensor]
"""(tensors whose dim 0 is the batch, tensors that all rows share) -> a tensor whose dim 0 is the batch."""


@dataclass(frozen=True)
class Trial:
    """One comparison.

    Attributes:
        axis: batch, position, chunk or threads.
        num_outputs: elements compared.
        num_moved: those whose bits differ.
    """

    axis: str
    num_outputs: int
    num_moved: int


def trial(axis: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> Trial:
    """Compares bit patterns, so that a NaN equals itself and -0.0 is not 0.0."""
    moved = sum(int((_bits(a) != _bits(b)).sum()) for a, b in zip(got, want, strict=True))
    return Trial(axis, sum(x.numel() for x in want), moved)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Lets torch and the kernels use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def of_rows(call: Call, batched: Sequence[Tensor], shared: Sequence[Tensor]) -> Iterator[Trial]:
    """Compares an operator that treats the rows of a batch alike, forward and backward.

    Args:
        call: takes all the batched and all the shared tensors.
        batched: dim 0 is the batch; integers get no gradient.
        shared: their gradients are sums over the batch, which only threads may leave alone.

    Yields:
        The trials.
    """
    num_rows = batched[0].shape[0]
    seed: Tensor | None = None

    def run(rows: Sequence[Tensor], grad: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        nonlocal seed
        inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in rows]
        weights = [x.detach().clone().requires_grad_() for x in shared]
        out = call(*inputs, *weights)
        if seed is None:
            generator = torch.Generator().manual_seed(1)
            seed = torch.randn(out.shape, generator=generator).to(out.dtype)
        leaves = [x for x in (*inputs, *weights) if x.requires_grad]
        grads = torch.autograd.grad(out, leaves, grad(seed))
        num_batched = len(leaves) - len(weights)
        return [out.detach(), *grads[:num_batched]], list(grads[num_batched:])

    with threads(1):
        whole, sums = run(batched, lambda seed: seed)
        for number, size in enumerate(size for size in BATCHES if size < num_rows):
            for first in {0, (37 * number + 5) % (num_rows - size + 1), num_rows - size}:
                part, _ = run([x[first : first + size] for x in batched], lambda seed: seed[first : first + size])  # noqa: B023
                yield trial("batch", part, [x[first : first + size] for x in whole])
        turned, _ = run([x.flip(0) for x in batched], lambda seed: seed.flip(0))
        yield trial("position", [x.flip(0) for x in turned], whole)
    for number in THREADS:
        with threads(number):
            again, sums_again = run(batched, lambda seed: seed)
        yield trial("threads", [*again, *sums_again], [*whole, *sums])
