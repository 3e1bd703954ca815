"""Moving results between the ranks of a pipeline, without blocking, in the order that the program names.

A tensor that is sent is kept until its transfer is done, and no longer.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from drumline.schedules import Action


class Transfers:
    """Sends and receives of one step of a rank.

    Args:
        peers: the world's rank of each rank of the pipeline.
        group: of those; None where there is one rank, which sends nothing.
    """

    def __init__(self, peers: Sequence[int], group: dist.ProcessGroup | None):
        self._peers = peers
        self._group = group
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        self._coming: dict[Action, tuple[dist.Work | None, torch.Tensor]] = {}

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Starts to send."""
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._peers[peer], group=self._group)
        assert work is not None
        self._sent.append((work, tensor))

    def receive(self, result: Action, into: torch.Tensor, peer: int) -> None:
        """Starts to receive a result."""
        self._coming[result] = dist.irecv(into, self._peers[peer], group=self._group), into

    def keep(self, result: Action, tensor: torch.Tensor) -> None:
        """Hands a result to another stage of this rank."""
        self._coming[result] = None, tensor

    def take(self, result: Action) -> torch.Tensor:
        """A result that was received or kept, once it is there."""
        work, tensor = self._coming.pop(result)
        if work is not None:
            work.wait()
        return tensor

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []
