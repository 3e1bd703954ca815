"""A mixture deals every source its share, in every prefix, without a gap."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.data.mixture import Mixture

WEIGHTS = st.lists(st.floats(0.001, 1000, allow_nan=False), min_size=1, max_size=6)


@settings(max_examples=100)
@given(weights=WEIGHTS, num_samples=st.integers(1, 5000))
def test_every_prefix_holds_each_source_to_its_share_within_the_number_of_sources(weights, num_samples):
    mixture = Mixture(weights)
    source_N, _ = mixture.locate(np.arange(num_samples))
    shares = mixture.counts_S / mixture.period
    held = np.bincount(source_N, minlength=len(weights))
    assert np.abs(held - num_samples * shares).max() <= len(weights)


@settings(max_examples=100)
@given(weights=WEIGHTS)
def test_a_share_is_its_weight_to_one_part_in_60000(weights):
    mixture = Mixture(weights)
    ideal = np.array(weights) / np.sum(weights)
    assert np.abs(mixture.counts_S / mixture.period - ideal).max() < len(weights) / 60_000


@settings(max_examples=50)
@given(weights=WEIGHTS, begin=st.integers(0, 10**12))
def test_numbers_within_a_source_have_no_gap_and_no_repeat(weights, begin):
    source_N, number_N = Mixture(weights).locate(np.arange(begin, begin + 2000))
    for source in range(len(weights)):
        numbers = np.sort(number_N[source_N == source])
        assert (np.diff(numbers) == 1).all()


@settings(max_examples=50)
@given(weights=WEIGHTS, index=st.integers(0, 10**12))
def test_where_a_sample_comes_from_depends_on_its_index_alone(weights, index):
    together = Mixture(weights).locate(np.arange(index, index + 10))
    alone = Mixture(weights).locate(np.array([index + 7]))
    assert (together[0][7], together[1][7]) == (alone[0][0], alone[1][0])


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([1], [1]), ([0.7, 0.2, 0.1], [7, 2, 1]), ([3, 1], [3, 1]), ([2.5, 2.5], [1, 1]), ([1, 2, 3.5], [2, 4, 7])],
)
def test_simple_weights_are_held_exactly_in_a_short_period(weights, counts):
    assert Mixture(weights).counts_S.tolist() == counts


def test_a_source_of_tiny_weight_still_gives_samples():
    source_N, _ = Mixture([1, 1e-9]).locate(np.arange(1 << 17))
    assert (source_N == 1).sum() == 2


@settings(max_examples=50)
@given(weights=WEIGHTS, data=st.data())
def test_samples_before_a_source_repeats_are_counted_exactly(weights, data):
    numbers = data.draw(st.lists(st.integers(1, 50), min_size=len(weights), max_size=len(weights)))
    mixture = Mixture(weights)
    count = mixture.samples_before(numbers)
    source_N, number_N = mixture.locate(np.arange(count + 1))
    allowed = np.array(numbers)[source_N]
    assert (number_N[:count] < allowed[:count]).all()
    assert number_N[count] == allowed[count]


@pytest.mark.parametrize("weights", [[], [1, 0], [-1]])
def test_weights_that_are_not_positive_are_refused(weights):
    with pytest.raises(ValueError, match="positive weights"):
        Mixture(weights)
