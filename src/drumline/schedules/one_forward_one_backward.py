"""One forward, one backward, and its relatives: a rank starts `warmup` forwards, then alternates.

For p ranks, rank r, m micro-batches and v stages a rank:

    1f1b                     warmup p - 1 - r; bubble (p - 1) / (m + p - 1); rank r holds min(p - r, m) micro-batches.
                             Narayanan et al. 2019 (PipeDream), and 2021, arXiv:2104.04473, section 2.2.1
    interleaved-1f1b         warmup (v - 1) n + 2 (p - 1 - r); bubble (p - 1) / (v m + p - 1).
                             arXiv:2104.04473, section 2.2.2
    zb-h1                    1f1b whose backward is split; rank r keeps r weight gradients for later, so that every
                             rank holds min(p, m). The rank's idle time falls from (p - 1)(F + I + W) to
                             (p - 1)(F + I - W). Qi et al. 2024, arXiv:2401.10241, section 2.3 and table 1
    interleaved-zero-bubble  the same with v stages a rank, as ScheduleInterleavedZeroBubble of torch:
                             warmup (v - 1) n + (p - 1 - r); idle time of a rank (p - 1)(F + I - W) with the times of
                             one of its stages; every rank holds min(p, m)

The interleaved ones go through the micro-batches in rounds of n, each through all of a rank's stages. There are
max(1, m // p) rounds, as even as can be and none smaller than p where m >= p, so that any m works; the published form
is n = p. Where the rounds are even the order is that of torch.
"""

from itertools import islice, zip_longest

from drumline.schedules.action import Action, Kind
from drumline.schedules.schedule import Schedule, looped


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Schedule:
    """Generates 1F1B for any number of micro-batches."""
    order = (
        _alternate(rank, num_ranks, [num_microbatches], virtual=1, warmup=num_ranks - 1 - rank)
        for rank in range(num_ranks)
    )
    return Schedule("1f1b", num_microbatches, looped(num_ranks, 1), tuple(order))


def zero_bubble_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Generates ZB-H1 for any number of micro-batches."""
    order = (
        _alternate(rank, num_ranks, [num_microbatches], virtual=1, warmup=num_ranks - 1 - rank, weight_delay=rank)
        for rank in range(num_ranks)
    )
    return Schedule("zb-h1", num_microbatches, looped(num_ranks, 1), tuple(order))


def interleaved(num_ranks: int, num_microbatches: int, virtual: int) -> Schedule:
    """Generates interleaved 1F1B for any number of micro-batches and stages a rank."""
    rounds = _rounds(num_ranks, num_microbatches)
    order = (
        _alternate(rank, num_ranks, rounds, virtual, (virtual - 1) * rounds[0] + 2 * (num_ranks - 1 - rank))
        for rank in range(num_ranks)
    )
    return Schedule("interleaved-1f1b", num_microbatches, looped(num_ranks, virtual), tuple(order))


def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, virtual: int) -> Schedule:
    """Generates the interleaved zero-bubble schedule for any number of micro-batches and stages a rank."""
    rounds = _rounds(num_ranks, num_microbatches)
    order = (
        _alternate(rank, num_ranks, rounds, virtual, (virtual - 1) * rounds[0] + num_ranks - 1 - rank, rank)
        for rank in range(num_ranks)
    )
    return Schedule("interleaved-zero-bubble", num_microbatches, looped(num_ranks, virtual), tuple(order))


def _rounds(num_ranks: int, num_microbatches: int) -> list[int]:
    """The micro-batches of each round, larger rounds first: the first sets the warm-up and so suffices for all."""
    count = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, count)
    return [size + 1] * larger + [size] * (count - larger)


def _alternate(
    rank: int, num_ranks: int, rounds: list[int], virtual: int, warmup: int, weight_delay: int | None = None
) -> tuple[Action, ...]:
    is_split = weight_delay is not None
    forwards = _through_rounds(Kind.FORWARD, rank, num_ranks, rounds, range(virtual))
    backward = Kind.INPUT if is_split else Kind.BACKWARD
    backwards = _through_rounds(backward, rank, num_ranks, rounds, range(virtual)[::-1])
    actions = forwards[:warmup]
    weights = iter([action._replace(kind=Kind.WEIGHT) for action in backwards] if is_split else [])
    for done, (first, second) in enumerate(zip_longest(forwards[warmup:], backwards)):
        actions += [action for action in (first, second) if action]
        actions += islice(weights, 1 if is_split and done >= weight_delay else 0)
    return (*actions, *weights)


def _through_rounds(kind: Kind, rank: int, num_ranks: int, rounds: list[int], chunks: range) -> list[Action]:
    starts = [sum(rounds[:index]) for index in range(len(rounds))]
    return [
        Action(chunk * num_ranks + rank, kind, microbatch)
        for start, size in zip(starts, rounds, strict=True)
        for chunk in chunks
        for microbatch in range(start, start + size)
    ]
