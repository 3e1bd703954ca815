"""Sharded data parallelism: FSDP2 as ZeRO-1, -2 and -3, alone or inside replicas (HSDP).

What the stages share is torch's `fully_shard`; they differ in what is thrown away when:

    stage  parameters after the forward   gradients of a micro-batch that is not the step's last
    1      kept                           kept whole, summed once at the end of the step
    2      kept                           reduce-scattered
    3      freed, gathered again          reduce-scattered

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5; Zhao et al. 2023, arXiv:2304.11277.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from drumline.parallel.gradients import layers_of


def shard(
    model: nn.Module, mesh: DeviceMesh, *, zero: int, compute_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> None:
    """Shards a model's blocks, then its root.

    Args:
        model: on meta or on a device; its `layers` are sharded one by one.
        mesh: 1-d, the ranks that share parameters, or 2-d, replicas of these first.
        zero: the stage, 1 to 3.
        compute_dtype: that parameters are gathered in.
        reduce_dtype: that gradients are summed in.
    """
    # Inputs are not cast: rotary tables stay fp32 beside bf16 activations.
    policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False)
    for block in layers_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3)
    # The root holds the embedding and the output projection; the backward begins with them, so freeing them gains
    # nothing.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the global count of tokens, so gradients are summed; gloo knows no PREMUL_SUM.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def free_gathered(model: nn.Module) -> None:
    """Frees what a forward without a backward left gathered; nothing where nothing is sharded."""
    if isinstance(model, FSDPModule):
        model.reshard()


class Sharded:
    """Steers the communication of a sharded model under accumulation.

    Args:
        model: that `shard` was applied to.
        zero: the same stage.
    """

    def __init__(self, model: nn.Module, zero: int):
        if not isinstance(model, FSDPModule):
            raise TypeError("Sharded steers a model that shard() was applied to")
        self._model: FSDPModule = model
        self._params = list(model.parameters())
        self._zero = zero

    def set_sync(self, sync: bool) -> None:
        """Whether the coming backward is the last of its step."""
        if self._zero == 1:
            self._model.set_requires_gradient_sync(sync)
        else:
            self._model.set_requires_all_reduce(sync)
        self._model.set_is_last_backward(sync)

    def zero_grad(self) -> None:
        """Drops the sharded gradients."""
        for param in self._params:
            param.grad = None

    def finish(self) -> None:
        """FSDP2 waits for its reductions at the end of the backward; nothing is left to do."""

    def local(self) -> list[torch.Tensor]:
        """This rank's pieces of the gradients."""
        return [p.grad.to_local() for p in self._params if isinstance(p.grad, DTensor)]
