"""Gradients of experts to which several data-parallel ranks send tokens of their micro-batches at once.

Each rank's i-th micro-batch comes at the same time. They are counted through sender by sender, as if one rank had had
the lanes of all of them.
"""

import torch

from drumline.parallel.gradients import Gradients


class FromSenders:
    """Hands micro-batches on one by one.

    Args:
        inner: sums them, and takes the gradient of each by its number among those of all senders.
        num_senders: data-parallel ranks with consecutive lanes.
        per_sender: micro-batches of each in a step.
    """

    def __init__(self, inner: Gradients, num_senders: int, per_sender: int):
        self._inner = inner
        self._num_senders = num_senders
        self._per_sender = per_sender

    def set_sync(self, sync: bool) -> None:
        """As `Gradients`."""
        self._inner.set_sync(sync)

    def begin(self, microbatch: int) -> None:
        """As `Gradients`."""
        self._inner.begin(microbatch)

    def end(self, microbatch: int) -> None:
        """As `Gradients`, for the micro-batch of every sender."""
        for sender in range(self._num_senders):
            self._inner.end(sender * self._per_sender + microbatch)

    def zero_grad(self) -> None:
        """As `Gradients`."""
        self._inner.zero_grad()

    def finish(self) -> None:
        """As `Gradients`."""
        self._inner.finish()

    def local(self) -> list[torch.Tensor]:
        """As `Gradients`."""
        return self._inner.local()

    def counted(self) -> list[torch.Tensor]:
        """As `Gradients`."""
        return self._inner.counted()
