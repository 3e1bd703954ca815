"""What all exact gradients share: taking each micro-batch's gradients, and summing them by lanes."""

from collections.abc import Sequence

import torch

from drumline.comm import Owners
from drumline.numerics.tree import Node
from drumline.parallel.exact.deposits import Deposits
from drumline.parallel.exact.sums import LaneSums
from drumline.parallel.exact.use import Use
from drumline.recipe.lanes import Lanes


class Collected:
    """The lane sums of a rank's uses.

    Args:
        uses: of the parameters.
        deposits: that operators of the model put gradients down in.
        lanes: of the run.
        data_rank: of this process.
    """

    def __init__(self, uses: Sequence[Use], deposits: Deposits, lanes: Lanes, data_rank: int):
        self.uses = uses
        self.owners = Owners(tuple(lanes.owned_by(rank) for rank in range(lanes.data_degree)))
        self.nodes = self.owners.nodes(data_rank)
        self._deposits = deposits
        self._lanes = lanes
        self._owned = lanes.owned_by(data_rank)
        self.clear()

    def clear(self) -> None:
        """Forgets all sums and gradients."""
        lanes = self._lanes
        self._deposits.clear()
        self._sums = [LaneSums(self._owned, lanes.num_lanes, lanes.num_microbatches) for _ in self.uses]

    def begin(self, microbatch: int) -> None:
        """As `Gradients`."""
        self._deposits.begin(microbatch)

    def end(self, microbatch: int) -> None:
        """Takes the gradients of a micro-batch; a use without one has one of zeros.

        Args:
            microbatch: its number among this rank's.
        """
        for use, sums in zip(self.uses, self._sums, strict=True):
            grad = use.take(microbatch)
            # A sharded parameter has the shape of the whole, as its gradient has here.
            sums.put(microbatch, torch.zeros(use.param.shape, device=use.param.device) if grad is None else grad)

    def take(self, index: int) -> list[torch.Tensor]:
        """The sums of this rank's nodes of a use, in the order of `nodes`; they are forgotten here."""
        found: dict[Node, torch.Tensor] = self._sums[index].take()
        assert list(found) == self.nodes, "every micro-batch of the step has been through the backward"
        return list(found.values())
