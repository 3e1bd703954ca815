"""Schedules that go down the ranks and up again: rank r holds stages r and 2p - 1 - r, so the loss is on rank 0.

    zbv        no rank idles between its first and its last action when F, I and W take the same time, and a rank holds
               at most p micro-batches' worth of activations (2p of its half-sized stages).
               Qi et al. 2024, arXiv:2401.10241, section 6
    dualpipev  pairs a forward of one stage with a backward of the other, so that one's communication can hide
               behind the other's computation. A rank idles at most (p - 1)(F&B + B - 3W), where F&B is the time of
               such a pair, and less where, as here, the forward need not wait for the backward's input.
               DeepSeek 2025, github.com/deepseek-ai/DualPipe; arXiv:2412.19437, section 3.2.1 and table 2

Both are defined from 2p - 1 and 2p micro-batches on; with fewer, the missing ones are left out. The order is that of
torch, with a pair (OVERLAP_F_B) written as its forward and then its backward.
"""

from collections import Counter, deque

from drumline.schedules.action import Action, Kind
from drumline.schedules.schedule import Schedule, keep_microbatches, v_shaped

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741 - the letters of the field


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Generates ZBV for any number of micro-batches."""
    planned = max(2 * num_ranks - 1, num_microbatches)
    order = (keep_microbatches(_zbv_rank(rank, num_ranks, planned), num_microbatches) for rank in range(num_ranks))
    return Schedule("zbv", num_microbatches, v_shaped(num_ranks), tuple(order))


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """Generates DualPipeV for any number of micro-batches."""
    planned = max(2 * num_ranks, num_microbatches)
    order = (
        keep_microbatches(_dualpipev_rank(rank, num_ranks, planned), num_microbatches) for rank in range(num_ranks)
    )
    return Schedule("dualpipev", num_microbatches, v_shaped(num_ranks), tuple(order))


class _Writer:
    """Writes a rank's actions; each stage and kind goes through the micro-batches in order."""

    def __init__(self):
        self.actions: list[Action] = []
        self._next: Counter[tuple[int, Kind]] = Counter()
        self._owed: deque[Action] = deque()  # weight gradients whose input gradient is written

    def add(self, stage: int, *kinds: Kind) -> None:
        """Writes actions of a stage on its next micro-batches."""
        for kind in kinds:
            counter = (stage, I if kind is B else kind)  # whole and split backwards share one count
            action = Action(stage, kind, self._next[counter])
            self.actions.append(action)
            self._next[counter] += 1
            if kind is I:
                self._owed.append(action._replace(kind=W))
            elif kind is W:
                self._owed.remove(action)

    def add_owed_weight(self) -> None:
        """Writes the weight gradient that has waited longest, if any waits."""
        if self._owed:
            self.actions.append(self._owed.popleft())

    def num_written(self, stage: int, kind: Kind) -> int:
        """Actions of a stage and a kind so far."""
        return self._next[stage, kind]

    def num_owed(self, stage: int) -> int:
        """Weight gradients of a stage that are still to be written."""
        return sum(action.stage == stage for action in self._owed)


def _zbv_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    down, up = rank, 2 * num_ranks - 1 - rank
    to_last = num_ranks - rank
    writer = _Writer()
    writer.add(down, *[F] * (2 * to_last - 1))
    for _ in range(rank):
        writer.add(up, F)
        writer.add(down, F)
    for _ in range(to_last):
        writer.add(up, F, I, W)
    while (started := writer.num_written(down, F)) < num_microbatches or writer.num_written(up, F) < started:
        if started < num_microbatches:
            writer.add(down, F)
        writer.add(down, I, W)
        writer.add(up, F, I, W)
    for _ in range(rank):
        writer.add(down, I)
        writer.add(up, I)
    for _ in range(to_last):
        writer.add(down, I)
        writer.add(down, W)
    writer.add(up, *[W] * writer.num_owed(up))
    writer.add(down, *[W] * writer.num_owed(down))
    return writer.actions


def _dualpipev_rank(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    down, up = rank, 2 * num_ranks - 1 - rank
    after = num_ranks - 1 - rank  # ranks behind this one
    writer = _Writer()
    writer.add(down, *[F] * (2 * after))
    for _ in range(rank + 1):
        writer.add(down, F)
        writer.add(up, F)
    for _ in range(after):
        writer.add(up, I)
        writer.add_owed_weight()
        writer.add(up, F)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        writer.add(down, F)
        writer.add(up, B)
        writer.add(up, F)
        writer.add(down, B)
    for _ in range(after):
        writer.add(up, B)
        writer.add(up, F)
        writer.add(down, B)
    # The second half of what remains is split, and its weight gradients fill the end.
    for index in range(2 * (rank + 1)):
        writer.add(down if index % 2 else up, B if index <= rank else I)
    for _ in range(after):
        writer.add_owed_weight()
        writer.add(down, I)
    for _ in range(rank + 1):
        writer.add_owed_weight()
    return writer.actions
