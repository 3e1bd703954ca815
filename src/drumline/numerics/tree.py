"""The one tree that exact mode sums by: binary, over logical leaves whose number and order belong to the recipe.

A node is an aligned run of 1, 2, 4, ... leaves. Its sum is that of its left half plus that of its right half; a half
that lies wholly beyond the last leaf is left out. Whoever owns a run of leaves sums the largest nodes inside the run,
which is all that others need of it, and whoever joins such nodes gets the bits that one owner of all leaves gets.
Leaves that come one after the other need log2(n) + 1 values at a time.
Source of the pairwise order and its error bound, log2(n) roundings: Higham 1993, SIAM J. Sci. Comput. 14(4), section 3.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Node(NamedTuple):
    """An aligned run of leaves.

    Attributes:
        start: its first leaf, a multiple of `size`.
        size: a power of two; the run may reach beyond the last leaf.
    """

    start: int
    size: int

    @property
    def sibling(self) -> "Node":
        """The other half of the parent."""
        return Node(self.start ^ self.size, self.size)

    @property
    def parent(self) -> "Node":
        """The node that this one is half of."""
        return Node(self.start & ~self.size, 2 * self.size)


def cover(leaves: range, num_leaves: int) -> list[Node]:
    """The largest nodes inside a run of leaves, which hold each of its leaves once.

    Args:
        leaves: consecutive, of [0, num_leaves).
        num_leaves: of the tree.

    Returns:
        The nodes, left to right: at most 2 log2(num_leaves); the root alone where the run is all leaves.
    """
    nodes, start = [], leaves.start
    # What lies beyond the last leaf is nobody's, so that the run that ends there owns it.
    stop = _root(num_leaves).size if leaves.stop == num_leaves else leaves.stop
    while start < leaves.stop:
        size = start & -start or _root(num_leaves).size
        while start + size > stop:
            size //= 2
        nodes.append(Node(start, size))
        start += size
    return nodes


def _root(num_leaves: int) -> Node:
    return Node(0, 1 << max(0, num_leaves - 1).bit_length())


class TreeSum(Generic[T]):
    """Sums values as they come, in any order, to the largest nodes that they make up.

    Args:
        num_leaves: of the tree.
        add: (left, right) -> their sum; it may be put into the memory of either.
    """

    def __init__(self, num_leaves: int, add: Callable[[T, T], T]):
        self._num_leaves = num_leaves
        self._add = add
        self._values: dict[Node, T] = {}

    def put(self, node: Node, value: T) -> None:
        """Takes up a leaf, `Node(index, 1)`, or the sum of a node.

        Args:
            node: that nothing was put to yet.
            value: it is not to be used by the caller from then on.
        """
        root = _root(self._num_leaves)
        while node != root:
            sibling = node.sibling
            if sibling in self._values:
                other = self._values.pop(sibling)
                value = self._add(value, other) if node < sibling else self._add(other, value)
            elif sibling.start < self._num_leaves:
                break
            node = node.parent
        self._values[node] = value

    def take(self) -> dict[Node, T]:
        """The nodes that there are, left to right; they are forgotten here."""
        values, self._values = dict(sorted(self._values.items())), {}
        return values


def tree_sum(values: Mapping[Node, torch.Tensor] | Sequence[torch.Tensor], num_leaves: int) -> torch.Tensor:
    """The sum of all leaves.

    Args:
        values: the leaves in order, or the sums of nodes that hold each leaf once; all of one shape and dtype. Their
            memory may be written.
        num_leaves: of the tree.

    Returns:
        The root's value.

    Raises:
        ValueError: the nodes are not all of the tree.
    """
    total = TreeSum[torch.Tensor](num_leaves, torch.Tensor.add_)
    if isinstance(values, Mapping):
        for node, value in values.items():
            total.put(node, value)
    else:
        for leaf, value in enumerate(values):
            total.put(Node(leaf, 1), value)
    found = total.take()
    if list(found) != [_root(num_leaves)]:
        raise ValueError(f"nodes {[tuple(node) for node in found]} are not the tree of {num_leaves} leaves")
    return found[_root(num_leaves)]
