"""Sums in fixed point, against rational arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.numerics import exact_sum

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def summed(parts, *, squared=False):
    """Each part as a rank would have it."""
    bound = max((exact_sum.largest([part]) for part in parts), default=0.0)
    words = [exact_sum.words([part], bound, squared=squared) for part in parts]
    return exact_sum.value((sum(high for high, _ in words), sum(low for _, low in words)), bound, squared=squared)


@given(st.data(), st.lists(FLOATS, min_size=1, max_size=40), st.booleans())
def test_neither_order_nor_cut_changes_a_bit(data, values, squared):
    x = torch.tensor(values)
    whole = summed([x], squared=squared)
    order = data.draw(st.permutations(range(len(values))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(values)), max_size=4)))
    assert summed(list(x[list(order)].tensor_split(cuts)), squared=squared) == whole


@given(st.lists(FLOATS, min_size=1, max_size=40), st.booleans())
def test_a_sum_is_within_the_stated_bound_of_the_rational_one(values, squared):
    exact = sum((Fraction(v) ** (2 if squared else 1) for v in values), Fraction(0))
    largest = max(Fraction(abs(v)) ** (2 if squared else 1) for v in values)
    found = Fraction(summed([torch.tensor(values)], squared=squared))
    allowed = len(values) * largest / 2**74 + abs(exact) / 2**52 + Fraction(5, 10**324)
    assert abs(found - exact) <= allowed


def test_a_norm_of_many_elements_equals_the_rounded_rational_one():
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    exact = math.fsum(float(v) ** 2 for v in x.tolist())  # squares of fp32 are exact in fp64
    assert summed(list(x.split(777)), squared=True) == exact


def test_words_of_a_long_piece_do_not_round():
    # All words of a piece at their largest: one more bit and fp64 would have to round.
    x = torch.full((1 << 20,), float(np.nextafter(np.float32(1), np.float32(0))))
    assert Fraction(summed([x])) == Fraction(float(x[0])) * (1 << 20)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows_in_the_bound(bad):
    found = exact_sum.largest([torch.ones(3), torch.tensor([0.0, bad]), torch.ones(2)])
    assert not math.isfinite(found)
    assert math.isnan(found) == math.isnan(bad)


def test_nothing_sums_to_nothing():
    assert summed([]) == 0.0
    assert summed([torch.zeros(5), torch.zeros(0)], squared=True) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("squared", [False, True])
def test_words_are_those_of_rational_arithmetic(dtype, squared):
    x = (torch.randn(20_011, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    bound = exact_sum.largest([x])
    high = low = 0
    for value in x.tolist():
        scaled = (Fraction(value) / Fraction(2) ** exact_sum.exponent(bound)) ** (
            2 if squared else 1
        ) * 2**exact_sum.WIDTH
        high += math.floor(scaled)
        low += math.floor((scaled - math.floor(scaled)) * 2**exact_sum.WIDTH)
    assert exact_sum.words([x], bound, squared=squared) == (high, low)
    assert exact_sum.words([x.double()], bound, squared=squared) == (high, low)  # without the kernel
