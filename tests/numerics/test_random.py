"""Counter-based randomness: known answers, slices, distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.numerics import random

KNOWN_ANSWERS = [  # Random123, tests/kat_vectors, lines "philox4x32 10"
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    words = tuple(torch.tensor([word, 0, word]) for word in counter)
    result = random.philox(words, key)
    assert tuple(result[:, 0].tolist()) == expected
    assert tuple(result[:, 2].tolist()) == expected


@settings(max_examples=40)
@given(start=st.integers(0, 200_000), count=st.integers(0, 70_000))
def test_a_slice_of_a_stream_has_the_bits_of_the_whole(start, count):
    whole = random.normal(3, "weights", 0, 270_000)
    assert torch.equal(random.normal(3, "weights", start, count), whole[start : start + count])


@pytest.mark.parametrize("draw", [random.words, random.uniform, random.normal])
def test_a_slice_far_beyond_32_bits_has_the_bits_of_a_longer_one(draw):
    start = 5 * 2**33 - 3
    assert torch.equal(draw(3, "weights", start + 2, 9), draw(3, "weights", start, 40)[2:11])


def test_streams_seeds_and_elements_differ():
    draws = [random.words(seed, stream, 0, 1000) for seed in (0, 1, 2**32, 2**63) for stream in ("a", "b")]
    assert len(torch.cat(draws).unique()) > 7990  # birthday: about 0.007 equal pairs expected among 8,000 words


def test_the_bits_are_the_ones_of_every_machine():
    # Pins the stream: a checkpointed run that initializes anew, or a rank on another machine, must get these.
    digest = np.frombuffer(random.normal(7, "pin", 10, 100_003).numpy().tobytes(), dtype=np.uint32)
    assert int(np.bitwise_xor.reduce(digest)) == 0xC8A5C2EA
    assert int(digest.astype(np.uint64).sum()) == 213079738979032


def test_normals_are_box_muller_of_the_words_within_fp32_rounding():
    u = (random.words(11, "z", 0, 400_000)[0::2].float() * 2**-32 + 2**-33).double()
    direction = random.words(11, "z", 0, 400_000)[1::2]
    theta = ((direction & 0x3FFFFFFF).double() - 2**29) * (math.pi / 2 / 2**30)
    radius = (-2 * u.log()).sqrt() * (1 - 2 * (direction >> 31).double())
    is_swapped = (direction >> 30 & 1) == 1
    expected = (
        torch.stack(
            (torch.where(is_swapped, theta.sin(), theta.cos()), torch.where(is_swapped, theta.cos(), theta.sin())), -1
        )
        * radius[:, None]
    )
    assert (random.normal(11, "z", 0, 400_000) - expected.view(-1)).abs().max() < 1e-6


def test_normals_have_the_normal_distribution():
    count = 4_000_000
    z = random.normal(5, "distribution", 0, count).double()
    assert abs(z.mean()) < 5 / math.sqrt(count)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / count)
    assert abs((z**3).mean()) < 5 * math.sqrt(15 / count)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / count)
    cdf = 0.5 * (1 + torch.erf(z.sort().values / math.sqrt(2)))
    kolmogorov = (cdf - (torch.arange(count) + 0.5) / count).abs().max() * math.sqrt(count)
    assert kolmogorov < 1.95  # one time in 1,000 above
    assert abs((z[0::2] * z[1::2]).mean()) < 5 / math.sqrt(count / 2)
    assert abs((z[0::2] ** 2 * z[1::2] ** 2).mean() - 1) < 5 * math.sqrt(8 / (count / 2))


def test_uniforms_fill_the_unit_interval():
    u = random.uniform(5, "uniform", 0, 1_000_000)
    assert 0 <= u.min() < 1e-5
    assert 1 - 1e-5 < u.max() < 1
    counts = torch.histc(u, 100, 0, 1)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 149  # chi-squared with 99 degrees of freedom, one time in 1,000


def test_nothing_is_drawn_from_the_global_generator():
    before = torch.random.get_rng_state()
    random.normal(0, "a", 0, 10)
    assert torch.equal(before, torch.random.get_rng_state())
