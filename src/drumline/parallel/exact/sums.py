"""The sums of a rank's micro-batches, in the order of the recipe whatever the order in which they come.

    lane = (g_0 + g_1) + g_2 + ...      its micro-batches, one after the other
    nodes of the tree over the lanes    as far as this rank's lanes make them up

A micro-batch that comes before its turn waits, as it may under a schedule of one's own. In order, one gradient for the
running lane and log2(lanes) for finished nodes are held.
"""

import torch

from drumline.numerics.tree import Node, TreeSum


class LaneSums:
    """One weight's gradient, or one use's.

    Args:
        lanes: of this rank, consecutive.
        num_lanes: of the recipe.
        num_microbatches: of a lane.
    """

    def __init__(self, lanes: range, num_lanes: int, num_microbatches: int):
        self._lanes = lanes
        self._num_microbatches = num_microbatches
        self._running: dict[int, tuple[int, torch.Tensor]] = {}
        self._waiting: dict[int, torch.Tensor] = {}
        self._nodes = TreeSum[torch.Tensor](num_lanes, torch.Tensor.add_)

    def put(self, microbatch: int, grad: torch.Tensor) -> None:
        """Takes up the gradient of a micro-batch.

        Args:
            microbatch: its number among this rank's, from 0; each once.
            grad: not to be used by the caller from then on.
        """
        self._waiting[microbatch] = grad
        lane, place = divmod(microbatch, self._num_microbatches)
        if place != (self._running[lane][0] if lane in self._running else 0):
            return
        while (first := lane * self._num_microbatches + place) in self._waiting:
            come = self._waiting.pop(first)
            total = self._running[lane][1].add_(come) if place else come
            place += 1
            self._running[lane] = place, total
            if place == self._num_microbatches:
                self._nodes.put(Node(self._lanes[lane], 1), self._running.pop(lane)[1])
                break

    def take(self) -> dict[Node, torch.Tensor]:
        """The sums of the largest nodes of this rank's lanes, left to right; they are forgotten here.

        Returns:
            The sums by node; empty where nothing came.

        Raises:
            ValueError: a lane lacks a micro-batch.
        """
        if self._running or self._waiting:
            raise ValueError("a lane lacks a micro-batch")
        return self._nodes.take()
