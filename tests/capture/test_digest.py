"""Hashes and sums of parts add up to those of the whole, however it is cut."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.capture.digest import digest, joined, starts_of_box, starts_of_rows, statistics
from drumline.numerics.kernels.hashing import hash_bits, hash_by_torch

WORD = 1 << 64
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def hash_in_python(array: np.ndarray) -> int:
    """The formula, number by number."""
    total = 0
    for index, bits in enumerate(array.view(f"u{array.itemsize}").flatten().tolist()):
        z = bits ^ (index * 0x9E3779B97F4A7C15 % WORD)
        z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93 % WORD
        total += z ^ (z >> 29)
    return total % WORD


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int16])
def test_the_hash_is_the_formula(dtype):
    array = np.random.default_rng(0).normal(size=(7, 5)).astype(dtype)
    tensor, starts = torch.from_numpy(array), torch.tensor([0])
    assert hash_bits(tensor, starts) == hash_by_torch(tensor, starts) == hash_in_python(array)


@given(st.data())
def test_boxes_that_tile_a_tensor_hash_to_its_hash(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from(DTYPES))
    whole = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    found = []
    for begin, end in ((0, cut), (cut, shape[dim])):
        offsets = tuple(begin if at == dim else 0 for at in range(len(shape)))
        part = whole.narrow(dim, begin, end - begin)
        if part.numel():
            found.append(digest(part, starts_of_box(shape, offsets, tuple(part.shape)), with_statistics=True))
    all_of_it = digest(whole, torch.tensor([0]), with_statistics=True)
    assert joined(found).hash == all_of_it.hash
    assert vars(joined(found).statistics) == pytest.approx(vars(all_of_it.statistics))


def test_rows_in_any_order_hash_to_the_whole():
    whole_NW = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))
    parts = [torch.tensor([0, 1, 2]), torch.tensor([8, 3, 5]), torch.tensor([4, 7, 6])]
    found = [digest(whole_NW[rows_N], starts_of_rows(rows_N, 4)) for rows_N in parts]
    assert joined(found).hash == hash_bits(whole_NW, torch.tensor([0]))


def test_one_bit_or_two_elements_that_change_places_change_the_hash():
    whole, start = torch.randn(64, generator=torch.Generator().manual_seed(3)), torch.tensor([0])
    before = hash_bits(whole, start)
    changed = whole.clone()
    changed[11] = torch.nextafter(whole[11], torch.tensor(math.inf))
    assert hash_bits(changed, start) != before
    swapped = whole.clone()
    swapped[[3, 40]] = whole[[40, 3]]
    assert hash_bits(swapped, start) != before
    assert hash_bits(-torch.zeros(4), start) != hash_bits(torch.zeros(4), start)


def test_statistics_leave_out_what_is_not_finite_and_count_it():
    found = statistics(torch.tensor([1.0, -3.0, 0.0, math.nan, math.inf, -math.inf]))
    assert (found.count, found.num_nan, found.num_infinite, found.num_zero) == (6, 1, 2, 1)
    assert (found.smallest, found.largest, found.total, found.squares) == (-3.0, 1.0, -2.0, 10.0)
    assert found.rms == pytest.approx(math.sqrt(10 / 3))
    assert statistics(torch.tensor([math.nan])).rms == 0.0
