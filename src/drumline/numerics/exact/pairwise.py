"""A sum over a fixed binary tree of leaves that come one at a time.

    ((a + b) + (c + d)) + ((e + f) + (g + h))

At most log2(leaves) + 1 partial sums are held. Where a rank owns an aligned run of the leaves, its sum is a node of the
tree, so that summing such nodes in the same way gives the bits of one rank that has all leaves.
Source: the binary counter of Blanchard et al. 2020, "A class of fast and accurate summation algorithms", section 2.
"""

from collections.abc import Iterable

import torch


class PairwiseSum:
    """The sum so far. What is added may be overwritten."""

    def __init__(self):
        self._partial: list[tuple[int, torch.Tensor | None]] = []

    def add(self, leaf: torch.Tensor | None) -> None:
        """Adds the next leaf; None: there is nothing at its place, and what it would be added to stays as it is."""
        level = 0
        while self._partial and self._partial[-1][0] == level:
            _, before = self._partial.pop()
            leaf = _joined(before, leaf)
            level += 1
        self._partial.append((level, leaf))

    def total(self) -> torch.Tensor | None:
        """The sum, once as many leaves have come as a power of two; None where no place had one.

        Returns:
            The sum.

        Raises:
            ValueError: the number of leaves is no power of two.
        """
        if len(self._partial) != 1:
            raise ValueError("the leaves of a binary tree are a power of two")
        return self._partial[0][1]


def pairwise_sum(leaves: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of leaves, a power of two of them, which may be overwritten."""
    found = PairwiseSum()
    for leaf in leaves:
        found.add(leaf)
    total = found.total()
    assert total is not None
    return total


def _joined(before: torch.Tensor | None, leaf: torch.Tensor | None) -> torch.Tensor | None:
    if before is None or leaf is None:
        return leaf if before is None else before
    return before.add_(leaf)
