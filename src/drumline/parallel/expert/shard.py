"""FSDP of experts that are spread over ranks: over the ranks that hold the same ones, not over all that share weights.

An expert's weights are [E / ep, out, in]. FSDP cuts their first dim where efsdp ranks can share out whole experts
evenly, else the second, so that no rank holds all of an expert that others hold nothing of.
Source: DeepSpeed-MoE, arXiv:2201.05596, section 5.1.2 (experts have a data-parallel group of their own).
"""

import itertools

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from drumline.models.moe import Experts


def experts_of(block: nn.Module) -> list[nn.Module]:
    """The stacks of experts in a block."""
    return [module for module in block.modules() if isinstance(module, Experts)]


def shard_experts(block: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard: bool) -> None:
    """Shards the experts of a block; comes before the block is sharded, which then leaves them out.

    Args:
        block: on meta or on a device.
        mesh: 1-d, the ranks that share the same experts, or 2-d, replicas of these first.
        policy: dtypes.
        reshard: gathered weights are freed after the forward.
    """
    degree = mesh.size(mesh.ndim - 1)

    def placement(param: nn.Parameter) -> Shard:
        return Shard(0 if param.shape[0] % degree == 0 or param.shape[1] % degree else 1)

    for experts in experts_of(block):
        fully_shard(experts, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=placement)


def prefetch_in_order(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Lets each block gather what the next one needs, experts too, in the forward and in the backward.

    By itself FSDP2 gathers ahead only as far as the host is ahead of the device; a dispatcher makes the host wait.

    Args:
        model: the root; both it and the blocks are sharded.
        blocks: in the order of the forward.
    """
    order = [[block, *experts_of(block)] for block in blocks]
    for before, after in zip([[model], *order], order, strict=False):
        _as_fsdp(before[0]).set_modules_to_forward_prefetch([_as_fsdp(module) for module in after])
    for before, after in itertools.pairwise(order):
        # In the backward experts come before what surrounds them.
        _as_fsdp(after[0]).set_modules_to_backward_prefetch([_as_fsdp(module) for module in before])


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
