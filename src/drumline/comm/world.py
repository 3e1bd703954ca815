"""Joining and leaving the world of ranks, and the few scalars that all ranks agree on each step.

A run of one rank joins nothing: every function here then returns at once, so the same loop runs alone and on a cluster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from drumline.comm.environment import Place
from drumline.recipe.errors import DrumlineError


class JoinError(DrumlineError):
    """The ranks could not meet."""


@dataclass(frozen=True)
class World:
    """All ranks of a run, seen from this one."""

    place: Place
    device: torch.device

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.world_size

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float] | torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Adds a vector of scalars over all ranks; the result is the same bits on each.

        Args:
            values: numbers, or a 1-d tensor [N].
            dtype: of the sum; int64 is exact for counts.

        Returns:
            [N] on this rank's device.
        """
        total = torch.as_tensor(values, dtype=dtype, device=self.device)
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each of some numbers over all ranks.

        Args:
            values: numbers; one that is nan somewhere is nan everywhere.

        Returns:
            As many numbers, the same on each rank.
        """
        # That one is nan goes beside, since backends differ in what the maximum with nan is.
        sent = [0.0 if math.isnan(value) else value for value in values] + [
            float(math.isnan(value)) for value in values
        ]
        most = torch.tensor(sent, dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        found = most.tolist()
        return [math.nan if is_nan else value for value, is_nan in zip(found, found[len(values) :], strict=False)]

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def broadcast_object(self, value: object) -> object:
        """Rank 0's value, on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather_objects(self, value: object) -> list:
        """Every rank's value, in rank order, on every rank."""
        values: list = [value]
        if self.size > 1:
            values = [None] * self.size
            dist.all_gather_object(values, value)
        return values


def choose_device(wanted: str, place: Place) -> torch.device:
    """The device that this rank computes on.

    Args:
        wanted: `auto`, `cpu` or `cuda`.
        place: a local rank takes the CUDA device of its number.

    Returns:
        The device.

    Raises:
        JoinError: CUDA is wanted and there is none, or fewer devices than local ranks.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise JoinError("run.device = cuda, but torch finds no CUDA device here; try run.device=cpu")
    if place.local_rank >= torch.cuda.device_count():
        raise JoinError(
            f"local rank {place.local_rank} has no CUDA device: there are {torch.cuda.device_count()}; "
            f"start at most that many ranks on this host"
        )
    return torch.device("cuda", place.local_rank)


def join(place: Place, device: torch.device, timeout_s: float) -> World:
    """Joins the world: NCCL for CUDA tensors, gloo for CPU tensors.

    Args:
        place: where this process stands; a world of one joins nothing.
        device: of this rank.
        timeout_s: longest that joining, or later one collective, may take, seconds.

    Returns:
        The world.

    Raises:
        JoinError: the meeting point cannot be reached or its port is taken.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.world_size == 1:
        return World(place, device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        try:
            store = TCPStore(
                place.master_addr,
                place.master_port,
                place.world_size,
                is_master=place.rank == 0 and not place.has_agent_store,
                timeout=timeout,
                wait_for_workers=False,
            )
            # A restarted attempt must not read the addresses that a dead one left in a reused store.
            store = PrefixStore(f"attempt{place.attempt}", store)
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
        except (dist.DistError, RuntimeError, OSError) as error:
            raise JoinError(_why_not_joined(place, str(error).splitlines()[0])) from error
    return World(place, device)


def longest_wait() -> timedelta:
    """How long the ranks of the joined world wait for one another; groups of them should wait as long."""
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(group._device_types[0]).options._timeout


def leave() -> None:
    """Leaves the world, if one was joined."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _why_not_joined(place: Place, reason: str) -> str:
    address = f"{place.master_addr}:{place.master_port}"
    head = f"rank {place.rank} of {place.world_size} could not join at {address}"
    if "EADDRINUSE" in reason:
        return f"{head}: another process listens on that port; set MASTER_PORT to a free one on every rank"
    if place.rank:
        return f"{head}: {reason}\n  is rank 0 running there, and is the port open between the hosts?"
    return f"{head}: {reason}"
