"""A step around a ring of ranks: every rank hands a tensor to the next one and gets one from the previous one."""

import torch
import torch.distributed as dist


class Passing:
    """A tensor on its way to the next rank, and one like it from the previous rank; both set out on construction.

    Args:
        sent: contiguous; not to be written before `wait`.
        degree: ranks of the ring; one alone gets back what it sends.
        rank: this one's number in it.
        group: of the ring.
        tag: tells rings apart that turn at the same time.
        into: where to put what comes; None: new memory.
    """

    def __init__(
        self,
        sent: torch.Tensor,
        degree: int,
        rank: int,
        group: dist.ProcessGroup | None,
        *,
        tag: int = 0,
        into: torch.Tensor | None = None,
    ):
        self._sent = sent  # kept alive until it has left
        self._received = sent
        self._work: list[dist.Work] = []
        if degree > 1:
            self._received = torch.empty_like(sent) if into is None else into
            after, before = (rank + 1) % degree, (rank - 1) % degree
            self._work = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=after),
                    dist.P2POp(dist.irecv, self._received, group=group, tag=tag, group_peer=before),
                ]
            )

    def wait(self) -> torch.Tensor:
        """Returns what came."""
        for work in self._work:
            work.wait()
        return self._received
