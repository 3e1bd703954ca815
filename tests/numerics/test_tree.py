"""The tree: any owners, any order of arrival, one sum."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.numerics.tree import Node, TreeSum, cover, tree_sum


def by_recursion(values, start, size):
    """The definition: left half plus right half, what lies beyond the end left out."""
    if size == 1:
        return values[start]
    left = by_recursion(values, start, size // 2)
    return left if start + size // 2 >= len(values) else left + by_recursion(values, start + size // 2, size // 2)


def owners(draw, num_leaves):
    cuts = sorted(draw(st.sets(st.integers(1, num_leaves - 1)))) if num_leaves > 1 else []
    return [range(a, b) for a, b in zip([0, *cuts], [*cuts, num_leaves], strict=True)]


@given(st.data(), st.integers(1, 40))
def test_any_owners_and_any_order_give_the_sum_of_the_definition(data, num_leaves):
    values = [torch.randn(3, generator=torch.Generator().manual_seed(leaf)) for leaf in range(num_leaves)]
    size = 1 << max(0, num_leaves - 1).bit_length()
    expected = by_recursion(values, 0, size)
    sent = {}
    for owned in owners(data.draw, num_leaves):
        mine = TreeSum(num_leaves, torch.add)
        for leaf in data.draw(st.permutations(list(owned))):
            mine.put(Node(leaf, 1), values[leaf])
        nodes = mine.take()
        assert list(nodes) == cover(owned, num_leaves)
        sent |= nodes
    in_any_order = dict(data.draw(st.permutations(list(sent.items()))))
    assert torch.equal(tree_sum(in_any_order, num_leaves), expected)


@given(st.data(), st.integers(1, 200))
def test_a_cover_holds_each_leaf_once_and_is_small(data, num_leaves):
    start = data.draw(st.integers(0, num_leaves - 1))
    owned = range(start, data.draw(st.integers(start + 1, num_leaves)))
    nodes = cover(owned, num_leaves)
    held = [leaf for node in nodes for leaf in range(node.start, node.start + node.size) if leaf < num_leaves]
    assert held == list(owned)
    assert all(node.start % node.size == 0 for node in nodes)
    assert len(nodes) <= max(1, 2 * math.ceil(math.log2(num_leaves)))


def test_leaves_in_order_hold_few_values():
    total, most = TreeSum(64, torch.add), 0
    for leaf in range(64):
        total.put(Node(leaf, 1), torch.ones(1))
        most = max(most, len(total._values))
    assert most <= 6


def test_the_order_is_the_trees_and_not_one_after_the_other():
    values = [torch.tensor([x]) for x in (1.0, 2.0**-24, 2.0**-24, 2.0**-24)]
    in_a_row = values[0] + values[1] + values[2] + values[3]
    assert tree_sum([value.clone() for value in values], 4) == 1.0 + 2.0**-23
    assert in_a_row == 1.0
    assert Fraction(float(in_a_row)) != sum(Fraction(float(value)) for value in values)


def test_a_tree_that_lacks_a_leaf_is_refused():
    with pytest.raises(ValueError, match="not the tree of 4 leaves"):
        tree_sum({Node(0, 2): torch.ones(1), Node(3, 1): torch.ones(1)}, 4)
