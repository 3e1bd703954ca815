"""Sharded data parallelism: FSDP2 as ZeRO-1, -2 and -3, alone or inside replicas (HSDP).

What the stages share is torch's `fully_shard`; they differ in what is thrown away when:

    stage  parameters after the forward   gradients of a micro-batch that is not the step's last
    1      kept                           kept whole, summed once at the end of the step
    2      kept                           reduce-scattered
    3      freed, gathered again          reduce-scattered

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5; Zhao et al. 2023, arXiv:2304.11277.
"""

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from drumline.parallel.expert.shard import prefetch_in_order, shard_experts
from drumline.parallel.gradients import layers_of


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    zero: int,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shards a model's blocks, then its root.

    Args:
        model: on meta or on a device; its `layers` are sharded one by one.
        mesh: 1-d, the ranks that share parameters, or 2-d, replicas of these first.
        zero: the stage, 1 to 3.
        compute_dtype: that parameters are gathered in.
        reduce_dtype: that gradients are summed in.
        expert_mesh: the same for experts; None: they are sharded with their blocks.
    """
    # Inputs are not cast: rotary tables stay fp32 beside bf16 activations.
    policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False)
    for block in layers_of(model):
        if expert_mesh is not None:
            shard_experts(block, expert_mesh, policy, reshard=zero == 3)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3)
    # The root holds the embedding and the output projection; the backward begins with them, so freeing them gains
    # nothing.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if expert_mesh is not None:
        prefetch_in_order(model, list(layers_of(model)))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the global count of tokens, so gradients are summed; gloo knows no PREMUL_SUM.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def free_gathered(model: nn.Module) -> None:
    """Frees what a forward without a backward left gathered; nothing where nothing is sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def keep_gathered(model: FSDPModule) -> None:
    """Keeps parameters gathered and gradients unreduced until `take_gradients(is_last=True)`.

    For gradients that are computed without autograd's hooks (a backward that is split in two). It needs the memory of
    ZeRO-1 for as long.
    """
    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(False)


def take_gradients(model: FSDPModule, *, is_last: bool) -> None:
    """Does what FSDP2's hooks do with gradients that came without them; as `torch.distributed.pipelining` does it.

    Args:
        model: after `keep_gathered`.
        is_last: of the step: they are reduced now; else only accumulated, in the dtype of the reduction.
    """
    if is_last:
        model.set_is_last_backward(True)
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        model.set_reshard_after_backward(True)
    state = model._get_fsdp_state()
    for each in state._state_ctx.all_states:
        # torch 2.11 and older have one group.
        for group in getattr(each, "_fsdp_param_groups", None) or filter(None, [each._fsdp_param_group]):
            group.post_backward()
    if is_last:
        state._root_post_backward_final_callback()


class Sharded:
    """Steers the communication of a sharded model under accumulation.

    Args:
        model: that `shard` was applied to.
        zero: the same stage.
        counted: the parameters whose shards this rank counts.
        unsummed: parameters whose shards are still shares of a sum that FSDP knows nothing of, with its group.
    """

    def __init__(
        self,
        model: nn.Module,
        zero: int,
        *,
        counted: Collection[nn.Parameter] | None = None,
        unsummed: Sequence[tuple[Sequence[nn.Parameter], dist.ProcessGroup]] = (),
    ):
        if not isinstance(model, FSDPModule):
            raise TypeError("Sharded steers a model that shard() was applied to")
        self._model: FSDPModule = model
        self._params = list(model.parameters())
        self._counted = self._params if counted is None else list(counted)
        self._unsummed = unsummed
        self._zero = zero

    def set_sync(self, sync: bool) -> None:
        """Whether the coming backward is the last of its step."""
        if self._zero == 1:
            self._model.set_requires_gradient_sync(sync)
        else:
            self._model.set_requires_all_reduce(sync)
        self._model.set_is_last_backward(sync)

    def begin(self, microbatch: int) -> None:
        """Micro-batches are not kept apart."""

    def end(self, microbatch: int) -> None:
        """FSDP2's hooks have taken them."""

    def zero_grad(self) -> None:
        """Drops the sharded gradients."""
        for param in self._params:
            param.grad = None

    def finish(self) -> None:
        """FSDP2 waits for its reductions at the end of the backward; what it knows nothing of is summed here."""
        for params, group in self._unsummed:
            sum_together(_shards(params), group)

    def local(self) -> list[torch.Tensor]:
        """This rank's pieces of the gradients."""
        return _shards(self._params)

    def counted(self) -> list[torch.Tensor]:
        """Those of them that this rank counts."""
        return _shards(self._counted)


def _shards(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad.to_local() for p in params if isinstance(p.grad, DTensor)]


def sum_together(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sums tensors of one dtype over a group in place, in one collective."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))
