"""Exact gradients of whole replicas: lanes summed on their rank, nodes of the tree over the ranks, in buckets.

In place of a ring's all-reduce, whose order of summation follows the ranks, each rank sums a piece of a bucket by the
tree and the pieces are gathered: the same bytes.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from drumline.comm import tree_all_reduce
from drumline.comm.tree_reduce import even_pieces
from drumline.parallel.exact.collect import Collected
from drumline.parallel.exact.use import Use
from drumline.parallel.replicate import BUCKET_BYTES


class ExactReplicated:
    """Owns the gradients of a replicated model.

    Args:
        collected: the lane sums of its uses.
        group: the replicas; None: this rank is alone.
        bucket_bytes: a bucket is closed when it holds at least this many bytes.
    """

    def __init__(self, collected: Collected, group: dist.ProcessGroup | None, bucket_bytes: int = BUCKET_BYTES):
        self._collected = collected
        self._group = group
        self._buckets = into_buckets(collected.uses, bucket_bytes)
        self._flat: list[torch.Tensor] = []
        self._counted: list[torch.Tensor] = []

    def set_sync(self, sync: bool) -> None:
        """Nothing is sent before `finish`."""

    def begin(self, microbatch: int) -> None:
        """As `Gradients`."""
        self._collected.begin(microbatch)

    def end(self, microbatch: int) -> None:
        """Takes the gradients of a micro-batch."""
        self._collected.end(microbatch)

    def zero_grad(self) -> None:
        """Drops the gradients."""
        self._collected.clear()
        self._flat, self._counted = [], []
        for use in self._collected.uses:
            use.param.grad = None

    def finish(self) -> None:
        """Sums over the replicas; each parameter's gradient is a view into its bucket."""
        self._flat, self._counted = [], []
        for bucket in self._buckets:
            flat = self._summed(bucket)
            first = self._collected.uses[bucket[0]]
            for index, part in zip(bucket, flat.split([self._size(index) for index in bucket]), strict=True):
                param = self._collected.uses[index].param
                if first.adds:
                    assert param.grad is not None, "a parameter's first use comes first"
                    param.grad.add_(part.view(param.shape))
                else:
                    param.grad = part.view(param.shape)
            if not first.adds:
                self._flat.append(flat)
                if first.counts:
                    self._counted.append(self._own_piece(flat))

    def local(self) -> list[torch.Tensor]:
        """The gradients, as flat buckets."""
        return self._flat

    def counted(self) -> list[torch.Tensor]:
        """This rank's piece of each bucket: replicas share the counting out."""
        return self._counted

    def _summed(self, bucket: Sequence[int]) -> torch.Tensor:
        sums = [self._collected.take(index) for index in bucket]
        parts = [torch.cat([grad.reshape(-1) for grad in of_node]) for of_node in zip(*sums, strict=True)]
        if self._group is None:
            (flat,) = parts
            return flat
        return tree_all_reduce(parts, self._collected.owners, self._group)

    def _own_piece(self, flat: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return flat
        return flat.split(even_pieces(flat.numel(), self._group.size()))[dist.get_rank(self._group)]

    def _size(self, index: int) -> int:
        return self._collected.uses[index].param.numel()


def into_buckets(uses: Sequence[Use], bucket_bytes: int) -> list[list[int]]:
    """Cuts uses of a kind, last first, into runs of at least `bucket_bytes` of fp32 gradient; those that add to others
    come last.
    """
    buckets: list[list[int]] = []
    for kind in ((True, False), (False, False), (False, True), (True, True)):
        filled = bucket_bytes
        for index in reversed(range(len(uses))):
            if (uses[index].counts, uses[index].adds) != kind:
                continue
            if filled >= bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(index)
            filled += 4 * uses[index].param.numel()
    return buckets
