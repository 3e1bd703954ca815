"""What a rank does with the gradients of its micro-batches: any order of arrival, one sum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.numerics.tree import tree_sum
from drumline.parallel.exact.deposits import Deposits, apart
from drumline.parallel.exact.sums import LaneSums


def gradient(number):
    return torch.randn(5, generator=torch.Generator().manual_seed(number))


def lane_by_definition(lane, num_microbatches):
    total = gradient(lane * num_microbatches)
    for place in range(1, num_microbatches):
        total = total + gradient(lane * num_microbatches + place)
    return total


@given(st.data(), st.integers(0, 3), st.integers(1, 4), st.integers(1, 4))
def test_micro_batches_in_any_order_give_lanes_in_order(data, first, count, num_microbatches):
    sums = LaneSums(range(first, first + count), 8, num_microbatches)
    for number in data.draw(st.permutations(range(count * num_microbatches))):
        sums.put(number, gradient(first * num_microbatches + number))
    nodes = sums.take()
    covered = [leaf for node in nodes for leaf in range(node.start, node.start + node.size)]
    assert covered == list(range(first, first + count))
    for node, value in nodes.items():
        lanes = [lane_by_definition(lane, num_microbatches) for lane in range(node.start, node.start + node.size)]
        assert torch.equal(value, tree_sum(lanes, node.size))
    assert sums.take() == {}


def test_a_lane_that_lacks_a_micro_batch_is_refused():
    sums = LaneSums(range(2), 2, 2)
    for number in (0, 2, 3):
        sums.put(number, gradient(number))
    with pytest.raises(ValueError, match="lacks a micro-batch"):
        sums.take()


@given(st.permutations(range(8)))
def test_chunks_of_micro_batches_in_flight_are_kept_apart(order):
    deposits = Deposits()
    for chunk in order:
        for microbatch in (1, 0):
            deposits.begin(microbatch)
            deposits.put("w", gradient(8 * microbatch + chunk), chunk, 8)
    for microbatch in (0, 1):
        expected = tree_sum([gradient(8 * microbatch + chunk) for chunk in range(8)], 8)
        assert torch.equal(deposits.take("w", microbatch), expected)
    assert deposits.take("w", 0) is None


def test_a_missing_chunk_is_refused():
    deposits = Deposits()
    deposits.put("w", gradient(0), 0, 2)
    with pytest.raises(ValueError, match="not the tree of 2 leaves"):
        deposits.take("w", 0)


def test_a_use_apart_gives_autograd_nothing_and_deposits_everything():
    weight, deposits = torch.nn.Parameter(gradient(0)), Deposits()
    deposits.begin(3)
    (apart(weight, "second", deposits) * gradient(1) + weight * gradient(2)).sum().backward()
    assert torch.equal(weight.grad, gradient(2))
    assert torch.equal(deposits.take("second", 3), gradient(1))
