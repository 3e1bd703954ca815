"""The measures of a difference against their definitions, in fp64 on whole tensors."""

import math

import numpy as np
import pytest
import torch

from drumline.capture import metrics
from drumline.capture.metrics import difference, error_map

GENERATOR = torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(metrics, "_PIECE", 64)  # so that a small tensor has several


def pair(dtype=torch.float32):
    a = torch.randn(23, 17, generator=GENERATOR)
    b = a + 1e-3 * torch.randn(23, 17, generator=GENERATOR) * (torch.rand(23, 17, generator=GENERATOR) < 0.3)
    return a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_measure_is_what_it_is_defined_as(dtype):
    a, b = pair(dtype)
    x, y = a.double(), b.double()
    found = difference(a, b)
    assert found.num_unequal == int((x != y).sum())
    assert found.relative == pytest.approx(float((x - y).norm() / x.norm()))
    assert found.max_abs == float((x - y).abs().max())
    assert abs(float(x[found.at] - y[found.at])) == found.max_abs
    rows = (x - y).norm(dim=1) / x.norm(dim=1)
    assert found.worst_row == (int(rows.argmax()), pytest.approx(float(rows.max())))
    columns = (x - y).norm(dim=0) / x.norm(dim=0)
    assert found.worst_column == (int(columns.argmax()), pytest.approx(float(columns.max())))
    assert found.slope == pytest.approx(float((x * y).sum() / (x * x).sum()) - 1, abs=1e-12)


def test_ulps_count_the_numbers_between_two_through_zero():
    a = np.array([1.0, -1.0, 0.0, 1e-45], dtype=np.float32)
    b = a.copy()
    for _ in range(5):
        b = np.nextafter(b, np.float32(-2.0))
    assert difference(torch.from_numpy(a), torch.from_numpy(b)).max_ulp == 5
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0])).num_unequal == 0


def test_ulps_of_two_precisions_are_those_of_the_coarser():
    a = torch.tensor([1.0, 3.0])
    assert difference(a, torch.tensor([1.0, 3.0], dtype=torch.bfloat16)).num_unequal == 0
    assert difference(a, torch.tensor([1.0, 3.015625], dtype=torch.bfloat16)).max_ulp == 1


def test_a_sum_that_was_taken_twice_has_a_slope_of_one():
    a, _ = pair()
    assert difference(a, 2 * a).slope == pytest.approx(1.0)
    assert difference(a, a) == metrics.Difference(a.numel())


def test_not_a_numbers_are_counted_and_left_out_of_sums():
    a, b = torch.tensor([1.0, math.nan, 2.0, math.nan]), torch.tensor([1.0, math.nan, math.nan, 4.0])
    found = difference(a, b)
    assert found.num_nan == (2, 2, 2)
    assert found.num_unequal == 2
    assert found.relative == 0.0
    same = torch.tensor([math.nan, 1.0])
    assert difference(same, same).num_unequal == 0
    assert difference(same, same).num_nan == (1, 1, 0)
    infinite = torch.tensor([math.inf, 1.0])
    assert difference(infinite, infinite.clone()).num_unequal == 0


def test_numbers_where_there_should_be_none_are_infinitely_far():
    assert difference(torch.zeros(4), torch.ones(4)).relative == math.inf


def test_integers_have_no_ulps():
    found = difference(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 5]))
    assert (found.num_unequal, found.max_ulp, found.max_abs, found.at) == (1, None, 2.0, (2,))


def test_a_map_shows_where_and_marks_what_is_no_number():
    a = torch.zeros(32, 96)
    b = a.clone()
    b[2, 3], b[31, 95] = 4.0, math.nan
    grid = error_map(a, b)
    assert (len(grid), len(grid[0])) == (16, 48)
    assert grid[1][1] == 1.0
    assert grid[15][47] == -1.0
    assert sum(value != 0 for row in grid for value in row) == 2
