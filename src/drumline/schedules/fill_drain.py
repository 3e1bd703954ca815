"""GPipe: all forwards, then all backwards.

The bubble is (p - 1) / (m + p - 1) of the time for p ranks and m micro-batches, and a rank holds all m of them.
Source: Huang et al. 2019, arXiv:1811.06965, section 2.3. Backwards run in the order of the forwards, as in torch.
"""

from drumline.schedules.action import Action, Kind
from drumline.schedules.schedule import Schedule, looped


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Generates GPipe for any number of micro-batches."""
    order = (
        tuple(
            Action(rank, kind, microbatch)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for microbatch in range(num_microbatches)
        )
        for rank in range(num_ranks)
    )
    return Schedule("gpipe", num_microbatches, looped(num_ranks, 1), tuple(order))
