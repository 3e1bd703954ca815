"""Thinning keeps what stands out; smoothing is a weighted mean."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drumline.report.series import smooth, thin, to_json_numbers


@given(st.integers(0, 3000), st.integers(4, 400), st.integers(0, 2**32 - 1))
def test_thinning_keeps_the_ends_the_extremes_and_the_limit(num_points, limit, seed):
    values = np.random.default_rng(seed).normal(size=num_points)
    chosen = thin(values, limit)
    assert len(chosen) <= max(limit, 0)
    assert (np.diff(chosen) > 0).all()
    if num_points:
        assert {0, num_points - 1, int(np.argmin(values)), int(np.argmax(values))} <= set(chosen.tolist())


def test_a_spike_of_one_step_among_a_million_is_kept():
    values = np.zeros(1_000_000)
    values[123_456] = 9.0
    assert 123_456 in thin(values, 2000)


def test_thinning_passes_over_what_is_missing():
    values = np.full(10_000, np.nan)
    values[7000] = 1.0
    assert 7000 in thin(values, 100)


def test_smoothing_a_constant_gives_the_constant_from_the_start():
    np.testing.assert_allclose(smooth(np.full(50, 3.25), 10.0), 3.25, rtol=1e-12)


def test_smoothing_is_the_mean_with_exponential_weights():
    values = np.random.default_rng(0).normal(size=40)
    weights = np.exp(-np.arange(40)[::-1] / 7.0)
    np.testing.assert_allclose(smooth(values, 7.0)[-1], (values * weights).sum() / weights.sum(), rtol=1e-12)


def test_numbers_that_json_does_not_know_become_null():
    assert to_json_numbers([1.0, float("nan"), float("inf"), 0.123456789]) == [1, None, None, 0.123457]
