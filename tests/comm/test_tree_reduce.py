"""Sums over ranks by the tree: bit for bit the local tree, with the bytes of a ring."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from drumline.comm import Owners, tree_all_reduce, tree_reduce_scatter
from drumline.comm.tree_reduce import even_pieces
from drumline.numerics.tree import Node, TreeSum, tree_sum
from drumline.recipe.lanes import lanes_of


def leaves_of(num_leaves, size, dtype=torch.float32):
    return [torch.randn(size, generator=torch.Generator().manual_seed(leaf)).to(dtype) for leaf in range(num_leaves)]


def owners_of(num_ranks, num_leaves):
    return Owners(tuple(lanes_of(rank, num_ranks, num_leaves) for rank in range(num_ranks)))


def parts_of(owners, rank, leaves):
    mine = TreeSum(owners.num_leaves, torch.add)
    for leaf in owners.leaves[rank]:
        mine.put(Node(leaf, 1), leaves[leaf].clone())
    return list(mine.take().values())


class Wire:
    """Counts the bytes that a rank sends."""

    def __init__(self):
        self.num_bytes = 0

    def counting(self, function):
        def count(operations):
            self.num_bytes += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
            return function(operations)

        return count


@pytest.mark.parametrize("size", [64, 67, 2])
@pytest.mark.parametrize(("num_ranks", "num_leaves"), [(2, 8), (3, 8), (4, 4), (5, 8), (6, 7)])
def test_an_all_reduce_is_bitwise_the_local_tree_on_every_rank(num_ranks, num_leaves, size):
    def body():
        owners, leaves = owners_of(num_ranks, num_leaves), leaves_of(num_leaves, size)
        parts = parts_of(owners, dist.get_rank(), leaves)
        found = tree_all_reduce(parts, owners, dist.group.WORLD)
        assert torch.equal(found, tree_sum([leaf.clone() for leaf in leaves], num_leaves))

    run_ranks(num_ranks, body)


@pytest.mark.parametrize("sizes", [(3, 0, 5, 1), (4, 4, 4, 4)])
def test_a_reduce_scatter_leaves_each_rank_its_piece(sizes):
    def body():
        owners, leaves = owners_of(4, 8), leaves_of(8, sum(sizes))
        found = tree_reduce_scatter(parts_of(owners, dist.get_rank(), leaves), sizes, owners, dist.group.WORLD)
        whole = tree_sum([leaf.clone() for leaf in leaves], 8)
        assert torch.equal(found, whole.split(list(sizes))[dist.get_rank()])

    run_ranks(4, body)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_rank_sends_what_a_ring_sends(num_ranks):
    def body():
        owners, size, wire = owners_of(num_ranks, 8), 1024, Wire()
        parts = parts_of(owners, dist.get_rank(), leaves_of(8, size))
        with mock.patch.object(dist, "batch_isend_irecv", wire.counting(dist.batch_isend_irecv)):
            tree_reduce_scatter(
                [part.clone() for part in parts], even_pieces(size, num_ranks), owners, dist.group.WORLD
            )
            assert wire.num_bytes == 4 * size * (num_ranks - 1) // num_ranks
            tree_all_reduce(parts, owners, dist.group.WORLD)
        assert wire.num_bytes == 3 * 4 * size * (num_ranks - 1) // num_ranks

    run_ranks(num_ranks, body)


def test_the_order_of_gloo_is_another():
    def body():
        owners, leaves = owners_of(4, 4), leaves_of(4, 4096)
        own = leaves[dist.get_rank()].clone()
        dist.all_reduce(own)
        assert not torch.equal(own, tree_sum([leaf.clone() for leaf in leaves], 4))
        assert torch.allclose(own, tree_all_reduce([leaves[dist.get_rank()]], owners, dist.group.WORLD), atol=1e-5)

    run_ranks(4, body)
