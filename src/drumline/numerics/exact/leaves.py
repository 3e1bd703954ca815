"""A sum over the leaves of the tree, which come in order, and of which some may be missing."""

from collections.abc import Iterable

import torch

from drumline.numerics.tree import Node, TreeSum


class LeafSum:
    """The sum so far; it holds log2(leaves) + 1 values at most. What is added may be overwritten.

    Args:
        num_leaves: of the tree.
    """

    def __init__(self, num_leaves: int):
        self._nodes = TreeSum[torch.Tensor | None](num_leaves, _joined)
        self._next = 0

    def add(self, leaf: torch.Tensor | None) -> None:
        """Adds the next leaf; None: there is nothing at its place, and what it would be added to stays as it is."""
        self._nodes.put(Node(self._next, 1), leaf)
        self._next += 1

    def total(self) -> torch.Tensor | None:
        """The sum, once all leaves have come; None where no place had one. It is forgotten here.

        Returns:
            The sum.

        Raises:
            ValueError: leaves are missing.
        """
        found = list(self._nodes.take().values())
        if len(found) != 1:
            raise ValueError(f"{self._next} leaves are not all of the tree")
        return found[0]


def leaf_sum(leaves: Iterable[torch.Tensor], num_leaves: int) -> torch.Tensor:
    """The sum of leaves in order, which may be overwritten."""
    found = LeafSum(num_leaves)
    for leaf in leaves:
        found.add(leaf)
    total = found.total()
    assert total is not None
    return total


def _joined(before: torch.Tensor | None, leaf: torch.Tensor | None) -> torch.Tensor | None:
    if before is None or leaf is None:
        return leaf if before is None else before
    return before.add_(leaf)
