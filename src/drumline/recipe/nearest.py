"""The integers nearest to a given one for which something works: computed for messages, never guessed."""

from collections.abc import Callable

_REACH = 100_000  # candidates tried on each side; a message must not take longer than reading it


def nearest(value: int, works: Callable[[int], bool], low: int = 1, high: int = 2**63 - 1) -> list[int]:
    """The closest integer on each side of a value for which a condition holds.

    Args:
        value: where to start; not a candidate itself.
        works: the condition.
        low: smallest candidate.
        high: largest candidate.

    Returns:
        At most two integers, the closer first (the smaller on a tie); empty when none is within reach.
    """
    start_below, start_above = min(value - 1, high), max(value + 1, low)
    below = next((n for n in range(start_below, max(low, start_below - _REACH) - 1, -1) if works(n)), None)
    above = next((n for n in range(start_above, min(high, start_above + _REACH) + 1) if works(n)), None)
    return sorted((n for n in (below, above) if n is not None), key=lambda n: (abs(n - value), n))


def nearest_divisors(number: int, value: int) -> list[int]:
    """The closest divisors of `number` to `value`, one on each side."""
    return nearest(value, lambda n: number % n == 0, high=number)


def nearest_multiples(step: int, value: int) -> list[int]:
    """The closest positive multiples of `step` to `value`, one on each side."""
    below = (value - 1) // step * step
    found = [n for n in (below, below + step) if n > 0 and n != value]
    return sorted(found, key=lambda n: (abs(n - value), n))
