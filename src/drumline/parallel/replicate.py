"""Replicated data parallelism: whole replicas whose gradients are summed in buckets while the backward still runs.

Gradients live as views into flat fp32 buckets, filled in the order in which the backward finishes them; a full
bucket is reduced at once, behind the rest of the backward. torch's DistributedDataParallel is not used since it
rebuilds its buckets after the first step of a process: with more than two ranks the order of a sum follows the
place in the bucket, so a resumed run would differ in its last bits from one that was never interrupted. It also
averages, where the loss here is already divided by the global count of tokens.
Source: Li et al. 2020, arXiv:2006.15704, section 3.2 (bucketing, overlap, skipped synchronization under accumulation).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

BUCKET_BYTES = 25 * 2**20

AllReduce = Callable[[torch.Tensor, dist.ProcessGroup], dist.Work | None]


def sum_over(flat: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Starts an asynchronous sum of `flat` [N] over the group, in place."""
    return dist.all_reduce(flat, group=group, async_op=True)


@dataclass
class _Bucket:
    flat: torch.Tensor
    num_params: int
    num_ready: int = 0
    work: dist.Work | None = None


class Replicate:
    """Owns the gradients of a replicated model and sums them over its replicas.

    Args:
        params: the parameters, in the order of the forward.
        group: the replicas' process group.
        counts: whether this rank is the one that counts them.
        all_reduce: starts the sum of one bucket; another algorithm or a compressed one goes here.
        bucket_bytes: a bucket is closed when it holds at least this many bytes.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        group: dist.ProcessGroup,
        *,
        counts: bool = True,
        all_reduce: AllReduce = sum_over,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._group = group
        self._all_reduce = all_reduce
        self._counts = counts
        self._sync = True
        self._next = 0
        self._buckets: list[_Bucket] = []
        self._params = [p for p in params if p.requires_grad]
        for members in split_into_buckets(self._params, bucket_bytes):
            self._add_bucket(members)

    def set_sync(self, sync: bool) -> None:
        """Whether the coming backward is the last of its step; only then buckets are reduced."""
        self._sync = sync

    def begin(self, microbatch: int) -> None:
        """Micro-batches are not kept apart."""

    def end(self, microbatch: int) -> None:
        """Autograd has accumulated them in the buckets."""

    def zero_grad(self) -> None:
        """Zeroes the gradients in place: they stay views into the buckets."""
        for bucket in self._buckets:
            bucket.flat.zero_()

    def finish(self) -> None:
        """Waits until every bucket holds the sum; buckets whose parameters took no part are reduced now."""
        for bucket in self._buckets:
            bucket.num_ready = bucket.num_params
        self._launch_ready()
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.work, bucket.num_ready = None, 0
        self._next = 0

    def local(self) -> list[torch.Tensor]:
        """The gradients, as views into the buckets."""
        return [bucket.flat for bucket in self._buckets]

    def counted(self) -> list[torch.Tensor]:
        """The gradients, or none."""
        return self.local() if self._counts else []

    def _add_bucket(self, members: list[torch.nn.Parameter]) -> None:
        size = sum(p.numel() for p in members)
        bucket = _Bucket(torch.zeros(size, dtype=members[0].dtype, device=members[0].device), len(members))
        start = 0
        for param in members:
            param.grad = bucket.flat[start : start + param.numel()].view(param.shape)
            start += param.numel()
            param.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._on_ready(bucket))
        self._buckets.append(bucket)

    def _on_ready(self, bucket: _Bucket) -> None:
        if not self._sync:
            return
        bucket.num_ready += 1
        self._launch_ready()

    def _launch_ready(self) -> None:
        # Strictly in bucket order: ranks may finish gradients in different orders but must issue the same collectives.
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.num_ready < bucket.num_params:
                return
            bucket.work = self._all_reduce(bucket.flat, self._group)
            self._next += 1


def split_into_buckets(params: list[torch.nn.Parameter], bucket_bytes: int) -> list[list[torch.nn.Parameter]]:
    """Cuts parameters, last of the forward first, into runs of at least `bucket_bytes` of fp32 gradient (the last
    may be less).
    """
    buckets: list[list[torch.nn.Parameter]] = []
    filled = bucket_bytes
    for param in reversed(params):
        if filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += 4 * param.numel()
    return buckets
