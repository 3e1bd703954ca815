"""Gradients of weights that do not pass through autograd's `.grad`: put down by name, micro-batch and chunk.

An operator that sums a weight's gradient over chunks of tokens puts each chunk's share down here and gives autograd
none. The shares of a micro-batch are summed by the tree over chunks. A weight that is used in two places keeps the two
shares apart under two names, since where the places lie on two pipeline stages they can only be added at the end.
"""

from typing import Any

import torch

from drumline.numerics.tree import Node, TreeSum, tree_sum


class Deposits:
    """What the backwards of a step have put down and nobody has taken yet."""

    def __init__(self):
        self._microbatch = 0
        self._chunks: dict[tuple[str, int], tuple[int, TreeSum[torch.Tensor]]] = {}

    def begin(self, microbatch: int) -> None:
        """What is put down from now on is of this micro-batch."""
        self._microbatch = microbatch

    def put(self, name: str, grad: torch.Tensor, chunk: int = 0, num_chunks: int = 1) -> None:
        """Puts a chunk's share of a gradient down.

        Args:
            name: of the weight, or of one of its uses.
            grad: fp32, of the weight's shape; not to be used by the caller from then on.
            chunk: of the tokens of the micro-batch; each once.
            num_chunks: that the tokens are cut into, the leaves of the tree; the same each time.
        """
        key = name, self._microbatch
        if key not in self._chunks:
            self._chunks[key] = num_chunks, TreeSum(num_chunks, torch.Tensor.add_)
        self._chunks[key][1].put(Node(chunk, 1), grad)

    def take(self, name: str, microbatch: int) -> torch.Tensor | None:
        """The sum over the chunks of a micro-batch.

        Args:
            name: that it was put down under.
            microbatch: that was begun when it was.

        Returns:
            The sum; None where nothing was put down.

        Raises:
            ValueError: a chunk is missing.
        """
        found = self._chunks.pop((name, microbatch), None)
        return None if found is None else tree_sum(found[1].take(), found[0])

    def clear(self) -> None:
        """Forgets everything."""
        self._chunks.clear()


def apart(weight: torch.Tensor, name: str, deposits: Deposits) -> torch.Tensor:
    """The weight, for a use whose gradient is put down under a name of its own.

    Args:
        weight: any; autograd gives it no gradient of this use.
        name: of the use.
        deposits: where to.

    Returns:
        The weight.
    """
    return _Apart.apply(weight, name, deposits)  # pyright: ignore[reportReturnType]


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, name: str, deposits: Deposits):
        ctx.name, ctx.deposits = name, deposits
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor):
        ctx.deposits.put(ctx.name, grad_outputs[0])
        return None, None, None
