"""Activation checkpointing: a block keeps its input (and chosen results) and runs its forward again in the backward.

    none       keeps everything
    full       keeps the input of every block; one more forward of every block
    every_n    full, for blocks 0, n, 2n, ... only
    selective  keeps the results of matmuls and attention; computes norms, SwiGLU's product, casts and rotations again

Recomputing runs the same operators on the same inputs, so gradients have the bits that they have without.
Sources: Chen et al. 2016, arXiv:1604.06174 (full); Korthikanti et al. 2022, arXiv:2205.05198, section 5 (selective).
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from drumline.models import Layers
from drumline.recipe.sections import Memory, Model

_aten = torch.ops.aten
_KEPT = frozenset(
    (
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.linear.default,
        _aten._scaled_mm.default,
        _aten._grouped_mm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    )
)
_KEPT_NAMES = ("drumline::attention", "drumline::invariant_attention", "drumline::invariant_matmul", "flex_attention")


def apply_activation_checkpointing(model: nn.Module, memory: Memory) -> None:
    """Makes the blocks of a decoder recompute what the recipe says, in place. Comes before `compile` and sharding.

    Names of parameters and modules stay: a block's `forward` is replaced on the instance, nothing is wrapped.

    Args:
        model: has `layers`, blocks by their index, and `mtp`, a list of modules that each hold one more.
        memory: says how.
    """
    if memory.activation_checkpointing == "none":
        return
    stride = memory.every_n if memory.activation_checkpointing == "every_n" else 1
    is_selective = memory.activation_checkpointing == "selective"
    options = {"context_fn": _selective_contexts} if is_selective else {}
    shape = cast(Model, model.shape)
    further = enumerate(cast(nn.ModuleList, model.mtp), shape.num_layers)
    for i, block in (*cast(Layers, model.layers).items(), *further):
        if i % stride == 0:
            block.forward = _Recomputed(block.forward, options)


class _Recomputed:
    """A forward that keeps its inputs only. An object and not a closure: it is copied with its block, and compiled."""

    def __init__(self, forward: Callable[..., Any], options: dict[str, Any]):
        self.forward = forward
        self.options = options

    def __call__(self, *args, **kwargs):
        # No operator of a block draws random numbers, so the generators' states need not be saved and restored.
        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=False, **self.options, **kwargs)


def _selective_contexts():
    return create_selective_checkpoint_contexts(_keep_matmuls_and_attention)


def _keep_matmuls_and_attention(context, operator, *args, **kwargs) -> CheckpointPolicy:
    is_kept = operator in _KEPT or operator.name() in _KEPT_NAMES
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
