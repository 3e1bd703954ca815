"""The part of a Hugging Face config.json that describes a mixture of experts: Qwen3-MoE's.

What is only of training (balance, capacity) is neither read nor needed: transformers has no word for it, or another
one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.recipe.errors import DrumlineError
from drumline.recipe.sections import Model, Moe

_KEYS = {"experts_per_token": "num_experts_per_tok", "expert_hidden_dim": "moe_intermediate_size"}
# our key -> the value that transformers' Qwen3-MoE always has
_FIXED = {
    "num_shared_experts": 0,
    "scoring": "softmax",
    "routed_scaling": 1.0,
    "num_expert_groups": 1,
}
OF_TRAINING = ("balance", "aux_loss_coefficient", "bias_update_speed", "capacity_factor")
"""Keys that say how a run trains its experts, and nothing about weights that are there."""


def read_moe(path: Path, config: Mapping[str, Any]) -> Moe:
    """Reads the mixture of experts of a Qwen3-MoE.

    Args:
        path: of config.json, for messages.
        config: its values.

    Returns:
        The section; its keys of training have their defaults.

    Raises:
        DrumlineError: a key is missing, or layers with and without experts alternate.
    """
    # transformers wrote num_experts until 4, and writes num_local_experts since 5.
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    values = {"num_experts": num_experts, **{theirs: config.get(theirs) for theirs in _KEYS.values()}}
    missing = [key for key, value in values.items() if not value]
    if missing:
        raise DrumlineError(f"{path} describes a mixture of experts, but {', '.join(missing)} is missing")
    num_layers = config["num_hidden_layers"]
    step, without = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    dense = [index for index in range(num_layers) if index in without or (index + 1) % max(1, step)]
    if dense != list(range(len(dense))):
        raise DrumlineError(
            f"{path}: layers {dense} have no experts, but only dense layers before all others are supported"
            f"\n  decoder_sparse_step = {step}, mlp_only_layers = {sorted(without)}"
        )
    return Moe.model_validate(
        {
            "num_experts": num_experts,
            **{ours: config[theirs] for ours, theirs in _KEYS.items()},
            "num_dense_layers": len(dense),
            "normalize_weights": config.get("norm_topk_prob", False),
        }
    )


def write_moe(moe: Moe) -> dict[str, Any]:
    """The keys of config.json that say this mixture of experts to transformers 4 and 5."""
    has_loss = moe.balance == "aux_loss"
    return {
        "num_experts": moe.num_experts,
        "num_local_experts": moe.num_experts,
        **{theirs: getattr(moe, ours) for ours, theirs in _KEYS.items()},
        "norm_topk_prob": moe.normalize_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(moe.num_dense_layers)),
        "router_aux_loss_coef": moe.aux_loss_coefficient if has_loss else 0.0,
        "output_router_logits": False,
    }


def refuse_what_qwen3_moe_lacks(model: Model) -> None:
    """Raises for a mixture of experts that would give other logits in transformers' Qwen3-MoE.

    Args:
        model: a dense one is left to pass.

    Raises:
        DrumlineError: lists what it lacks.
    """
    moe = model.moe
    if moe is None:
        return
    faults = [] if model.family == "qwen3" else [f"model.family = {model.family!r}, only 'qwen3' can be exported"]
    faults += [
        f"model.moe.{key} = {getattr(moe, key)!r}, only {value!r} can be exported"
        for key, value in _FIXED.items()
        if getattr(moe, key) != value
    ]
    if moe.balance == "bias":
        faults.append("model.moe.balance = 'bias' moves the choice of experts, which transformers' Qwen3-MoE cannot")
    if faults:
        raise DrumlineError("\n  ".join(("transformers has no such mixture of experts:", *faults)))
