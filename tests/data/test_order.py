"""The keyed permutation is one, whatever its size and key, and looks random."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.data.order import Permutation, keyed_hash

KEYS = st.tuples(st.integers(0, 2**63), st.text(max_size=8), st.integers(0, 2**40))


@settings(max_examples=150)
@given(size=st.integers(1, 3000), key=KEYS)
def test_a_permutation_is_a_bijection(size, key):
    elements = Permutation(size, key)(np.arange(size))
    assert sorted(elements.tolist()) == list(range(size))


@settings(max_examples=100)
@given(size=st.integers(1, 2**62), key=KEYS, data=st.data())
def test_places_of_a_huge_permutation_go_to_distinct_elements_in_range(size, key, data):
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    elements = Permutation(size, key)(np.array(places))
    assert len(set(elements.tolist())) == len(places)
    assert elements.min() >= 0
    assert elements.max() < size


@settings(max_examples=50)
@given(size=st.integers(1, 10**6), key=KEYS, places=st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_an_element_depends_on_its_place_alone_and_not_on_what_is_asked_with_it(size, key, places):
    places = np.array(places) % size
    permutation = Permutation(size, key)
    together = permutation(places)
    assert together.tolist() == [int(Permutation(size, key)(np.array([place]))[0]) for place in places]


def test_other_seeds_epochs_and_names_give_other_orders():
    places = np.arange(1000)
    keys = [(0, "train", 0, 0), (1, "train", 0, 0), (0, "validation", 0, 0), (0, "train", 1, 0), (0, "train", 0, 1)]
    orders = {tuple(Permutation(1000, key)(places).tolist()) for key in keys}
    assert len(orders) == len(keys)


def test_the_order_is_pinned_so_that_a_run_resumes_under_a_later_version():
    assert Permutation(1000, (7, "train", 0, 3))(np.arange(8)).tolist() == PINNED


def test_elements_are_spread_evenly_and_neighbours_are_unrelated():
    size = 100_000
    elements = Permutation(size, (3, "train", 0, 0))(np.arange(size)).astype(np.float64)
    counts, _ = np.histogram(elements[:10_000], bins=20, range=(0, size))
    chi_square = ((counts - 500) ** 2 / 500).sum()
    assert chi_square < 44  # 19 degrees of freedom: passed by a random order with probability 0.999
    assert abs(np.corrcoef(elements[:-1], elements[1:])[0, 1]) < 0.012  # 4 standard deviations
    fixed = (elements == np.arange(size)).sum()
    assert fixed < 10  # a random order has 1 on average


def test_a_keyed_hash_is_uniform_and_depends_on_its_key():
    hashes = keyed_hash(np.arange(20_000), ("a",))
    assert abs((hashes < np.uint64(2**62)).mean() - 0.25) < 0.0125
    assert not (hashes == keyed_hash(np.arange(20_000), ("b",))).any()


def test_an_empty_permutation_is_refused():
    with pytest.raises(ValueError, match="at least one element"):
        Permutation(0, (0,))


PINNED = [65, 772, 28, 269, 454, 52, 312, 80]
