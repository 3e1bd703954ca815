"""The order of samples: a keyed permutation of 0..size-1 that is computed, never stored.

An alternating (unbalanced) Feistel network permutes the smallest power of two >= size; a result outside the range is
permuted again until it falls inside ("cycle walking", fewer than two rounds on average), which leaves a permutation
of exactly 0..size-1. So the sample at any place of any epoch is a pure function of (key, place): no state to save,
and every world size sees the same order.
Sources: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"; the mixing constants are from splitmix64
(Steele et al. 2014).
"""

import hashlib

import numpy as np

NUM_ROUNDS = 8
MIN_BITS = 4  # a network of one or two bits can only make a few of the permutations
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Permutation:
    """A permutation of 0..size-1 chosen by a key.

    Args:
        size: number of elements, at least 1.
        key: what the permutation depends on, such as (seed, "stdlib", epoch).
    """

    def __init__(self, size: int, key: tuple[int | str, ...]):
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, not {size}")
        bits = max(MIN_BITS, (size - 1).bit_length())
        self.size = size
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * NUM_ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, places_N: np.ndarray) -> np.ndarray:
        """Returns the element at each place.

        Args:
            places_N: int64, each in 0..size-1.

        Returns:
            int64 of the same shape.
        """
        if self.size == 1:
            return np.zeros_like(places_N, dtype=np.int64)
        values = self._once(places_N.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._once(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def at(self, place: int) -> int:
        """Returns the element at one place."""
        return int(self(np.array([place]))[0])

    def _once(self, values: np.ndarray) -> np.ndarray:
        low, high = values & self._low_mask, values >> self._low_bits
        for number in range(0, NUM_ROUNDS, 2):
            high = high ^ (_mix(low ^ self._round_keys[number]) & self._high_mask)
            low = low ^ (_mix(high ^ self._round_keys[number + 1]) & self._low_mask)
        return (high << self._low_bits) | low


def keyed_hash(indices_N: np.ndarray, key: tuple[int | str, ...]) -> np.ndarray:
    """Returns 64 well-mixed bits for each index: a pure function of (key, index).

    Args:
        indices_N: integers >= 0.
        key: what the hash depends on.

    Returns:
        uint64 of the same shape, uniform over its range.
    """
    salts = np.frombuffer(hashlib.blake2b(repr(key).encode(), digest_size=16).digest(), dtype="<u8").astype(np.uint64)
    return _mix(_mix(indices_N.astype(np.uint64) ^ salts[0]) ^ salts[1])


def _mix(values: np.ndarray) -> np.ndarray:
    """Returns splitmix64's finalizer: each output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))
