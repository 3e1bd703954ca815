"""Exact gradients under FSDP2: it gathers parameters and frees them; their gradients are taken whole and reduced here.

FSDP2 reduces when a module's backward is done, in the order of a ring over ranks. Here its reduction is off, gradients
of the gathered parameters are summed by lanes, and a bucket of them goes by the tree straight to the shards:

    rank (d, s) of dp x fsdp sums the d-th piece of what shard s holds; pieces of a shard are gathered along dp

Whole gradients live until the end of a step, as under ZeRO-1. Parameters are gathered in fp32, since a gradient of a
bf16 parameter would be rounded to bf16 where one device keeps it in fp32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from drumline.comm import gather_pieces, tree_reduce_scatter
from drumline.comm.tree_reduce import even_pieces
from drumline.parallel.exact.collect import Collected
from drumline.parallel.exact.replicated import into_buckets
from drumline.parallel.exact.use import take_grad
from drumline.parallel.place import to_local
from drumline.parallel.replicate import BUCKET_BYTES


class GatheredGradients:
    """Knows the gathered parameter of each sharded one.

    Args:
        model: that `shard` was applied to.
    """

    def __init__(self, model: nn.Module):
        self._of = {id(each.sharded_param): each for each in _fsdp_params(model)}

    def take(self, param: nn.Parameter) -> torch.Tensor | None:
        """The gradient of a sharded parameter's gathered form, which it then has no more."""
        return take_grad(self._of[id(param)].unsharded_param)


class ExactSharded:
    """Owns the gradients of a sharded model.

    Args:
        model: that `shard` was applied to.
        collected: the lane sums of its uses; parameters are DTensors, gradients whole.
        data_group: all ranks with different data, dp outermost; None: this one alone.
        replica_group: the ranks that hold the same shard; None: this one alone.
        shards: those that ranks of `data_group` have, one after the other; ranks that share a sequence have others.
        num_shards: ranks that share parameters out; 0: as many as there are of `shards`.
        bucket_bytes: of whole gradient, that a bucket holds at least.
    """

    def __init__(
        self,
        model: FSDPModule,
        collected: Collected,
        data_group: dist.ProcessGroup | None,
        replica_group: dist.ProcessGroup | None,
        shards: range,
        num_shards: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._model = model
        self._collected = collected
        self._data_group = data_group
        self._replica_group = replica_group
        self._shards = shards
        self._num_shards = num_shards or len(shards)
        # Not by who counts, on which the ranks of a group do not agree, and which is asked of each use alone.
        self._buckets = into_buckets([replace(use, counts=True) for use in collected.uses], bucket_bytes)

    def set_sync(self, sync: bool) -> None:
        """FSDP2 is told which backward is a step's last, and never to reduce."""
        self._model.set_requires_gradient_sync(False)
        self._model.set_is_last_backward(sync)

    def begin(self, microbatch: int) -> None:
        """As `Gradients`."""
        self._collected.begin(microbatch)

    def end(self, microbatch: int) -> None:
        """Takes the gradients of a micro-batch from the gathered parameters."""
        self._collected.end(microbatch)

    def zero_grad(self) -> None:
        """Drops the sharded gradients."""
        self._collected.clear()
        for use in self._collected.uses:
            use.param.grad = None

    def finish(self) -> None:
        """Sums over the ranks into the shards."""
        for bucket in self._buckets:
            shard, uses = self._summed(bucket), [self._collected.uses[index] for index in bucket]
            locals_ = [to_local(use.param) for use in uses]
            for use, local, part in zip(uses, locals_, shard.split([x.numel() for x in locals_]), strict=True):
                if use.adds:
                    assert isinstance(use.param.grad, DTensor), "a parameter's first use comes first"
                    use.param.grad.to_local().add_(part.view(local.shape))
                else:
                    use.param.grad = _as_sharded(part.view(local.shape), use.param)

    def local(self) -> list[torch.Tensor]:
        """This rank's pieces of the gradients."""
        return [to_local(use.param.grad) for use in self._collected.uses if use.param.grad is not None and not use.adds]

    def counted(self) -> list[torch.Tensor]:
        """Those of them that this rank counts."""
        return [
            to_local(use.param.grad)
            for use in self._collected.uses
            if use.param.grad is not None and use.counts and not use.adds
        ]

    def _summed(self, bucket: Sequence[int]) -> torch.Tensor:
        """This rank's shards of a bucket's parameters, one after the other."""
        sums, params = (
            [self._collected.take(index) for index in bucket],
            [self._collected.uses[i].param for i in bucket],
        )
        if self._data_group is None:
            ((of_shard,),) = (self._cut(of_node, params) for of_node in zip(*sums, strict=True))
            return torch.cat([each.reshape(-1) for each in of_shard])
        num_replicas = self._data_group.size() // len(self._shards)
        replica, shard = divmod(dist.get_rank(self._data_group), len(self._shards))
        firsts = [of_node[0] for of_node in sums]
        lengths = [sum(each.numel() for each in of_shard) for of_shard in self._cut(firsts, params)]
        pieces = [even_pieces(length, num_replicas) for length in lengths]
        parts = []
        for of_node in zip(*sums, strict=True):
            by_shard = [
                torch.cat([each.reshape(-1) for each in of_shard]).split(sizes)
                for of_shard, sizes in zip(self._cut(of_node, params), pieces, strict=True)
            ]
            parts.append(torch.cat([each[at] for at in range(num_replicas) for each in by_shard]))
        sizes = [each[at] for at in range(num_replicas) for each in pieces]
        own = tree_reduce_scatter(parts, sizes, self._collected.owners, self._data_group)
        if self._replica_group is None:
            return own.clone()  # not a view that keeps the whole bucket
        found = own.new_empty(lengths[shard])
        places = found.split(pieces[shard])
        places[replica].copy_(own)
        gather_pieces(places, own, replica, self._replica_group)
        return found

    def _cut(self, grads: Sequence[torch.Tensor], params: Sequence[nn.Parameter]) -> list[list[torch.Tensor]]:
        """For each shard, what it has of each gradient, as FSDP2 cuts them."""
        cut = [_chunks(grad, self._num_shards, _dim_of(param)) for grad, param in zip(grads, params, strict=True)]
        return [[each[at] for each in cut] for at in self._shards]


def _dim_of(param: nn.Parameter) -> int:
    """The dim that FSDP2 cuts: the first, but of some experts the second."""
    assert isinstance(param, DTensor)
    placement = param.placements[-1]
    assert isinstance(placement, Shard)
    return placement.dim


def _chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    chunks = list(tensor.chunk(count, dim))
    return chunks + [tensor.narrow(dim, 0, 0)] * (count - len(chunks))


def _as_sharded(local: torch.Tensor, param: nn.Parameter) -> DTensor:
    assert isinstance(param, DTensor)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _fsdp_params(model: nn.Module) -> Iterator:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # torch 2.11 and older have one group.
            for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
                yield from group.fsdp_params
