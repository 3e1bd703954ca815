"""Attention across ranks is as near to the definition in fp64 as one device is: results and all gradients."""

import dataclasses

import pytest
import torch
from tests.parallel.context.comparison import NAMES, Case, across_ranks, error_ratios, groups_of, in_fp64
from tests.ranks import ranks

FP32_LIMIT, BF16_LIMIT = 4.0, 2.0
TWO = [("ring", 1), ("gather", 1), ("ulysses", 2)]
FOUR = [("ring", 1), ("gather", 1), ("ulysses", 4), ("ring_ulysses", 2)]
MASKS = pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
WIDTHS = [16, 64]


def assert_within(case, limit):
    ratios = error_ratios(case)
    assert all(ratio <= limit for ratio in ratios.values()), (case, ratios)


@pytest.mark.parametrize(("method", "ulysses"), TWO)
@MASKS
@ranks(2)
def test_two_ranks_are_as_exact_as_one_device(method, ulysses, documents):
    for width in WIDTHS:
        for kv_heads in (1, 2, 4):
            case = Case(method, 4, kv_heads, width, ulysses=ulysses, documents=documents)
            assert_within(case, FP32_LIMIT)
            assert_within(dataclasses.replace(case, dtype=torch.bfloat16), BF16_LIMIT)


@pytest.mark.parametrize(("method", "ulysses"), FOUR)
@MASKS
@ranks(4)
def test_four_ranks_are_as_exact_as_one_device(method, ulysses, documents):
    for width in WIDTHS:
        for kv_heads in (1, 2, 4):
            case = Case(method, 8, kv_heads, width, ulysses=ulysses, documents=documents)
            assert_within(case, FP32_LIMIT)
            assert_within(dataclasses.replace(case, dtype=torch.bfloat16), BF16_LIMIT)


@pytest.mark.parametrize(("method", "ulysses"), FOUR)
@MASKS
@ranks(4)
def test_in_fp64_only_the_last_bits_differ(method, ulysses, documents):
    case = Case(method, ulysses=ulysses, dtype=torch.float64, documents=documents)
    for name, ranks_, exact in zip(NAMES, across_ranks(case, groups_of(4, ulysses)), in_fp64(case), strict=True):
        assert (ranks_ - exact).norm() / exact.norm() < 1e-13, name
