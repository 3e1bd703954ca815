"""DeepSeek-V3 in a Hugging Face folder: the part of its config.json that other families do not have, and its rows.

Published weights hold the rotary pairs of a head as neighbours (2i, 2i + 1), where here they are halves (i, i + R/2):
the rows of what makes queries and the rotary key change places on the way in and out. `rope_interleave = false` in
config.json says that they need not. Modules of multi-token prediction are the layers behind the last; the copies of the
embedding and of the output that a published folder keeps with them are left unread, and are not written.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from drumline.recipe.errors import DrumlineError
from drumline.recipe.sections import Mla, Model, Moe, Yarn

MODEL_TYPE = "deepseek_v3"
BIAS = "router.bias"
_MLA = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MOE = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "routed_scaling": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "groups_per_token": "topk_group",
}
_YARN = {
    "factor": "factor",
    "original_max_seq_len": "original_max_position_embeddings",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_EPS = 1e-6  # what transformers' norms of latents have, whatever rms_norm_eps says
_REQUIRED = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rms_norm_eps": _EPS}
_ROTATED = re.compile(r".*\.attention\.(q_proj|q_b_proj|kv_a_proj)\.weight")
_COPIES = re.compile(r"model\.layers\.(\d+)\.(embed_tokens|shared_head\.head)\.weight")


def deepseek_faults(config: Mapping[str, Any], rope: Mapping[str, Any]) -> list[str]:
    """What a config.json of this type lacks, or asks for and is not done here.

    Args:
        config: its values.
        rope: its rotary parameters.

    Returns:
        A line for each.
    """
    faults = [
        f"{key} = {config[key]!r}, only {wanted!r} is supported"
        for key, wanted in _REQUIRED.items()
        if config.get(key, wanted) != wanted
    ]
    faults += [f"{key} is missing" for key in (*_MLA, *_MOE.values()) if not config.get(key)]
    heads = config.get("num_attention_heads")
    if config.get("num_key_value_heads", heads) != heads:
        faults.append(f"num_key_value_heads = {config['num_key_value_heads']}, only num_attention_heads is supported")
    if rope.get("rope_type") == "yarn":
        faults += [f"the yarn rotary scaling lacks {key}" for key in _YARN.values() if not rope.get(key)]
        if rope.get("attention_factor") is not None or rope.get("truncate") is False:
            faults.append("attention_factor and truncate = false of the yarn rotary scaling are not supported")
    return faults


def read_deepseek(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Reads what only DeepSeek-V3 has; `deepseek_faults` finds none.

    Args:
        config: values of config.json.
        rope: its rotary parameters.

    Returns:
        Values of the recipe's model section. That experts are balanced by a bias is said too: the folder has it.
    """
    mla = Mla(q_lora_rank=config.get("q_lora_rank") or 0, **{key: config[key] for key in _MLA})
    moe = {ours: config[theirs] for ours, theirs in _MOE.items()}
    yarn = None
    if rope.get("rope_type") == "yarn":
        values = {ours: rope[theirs] for ours, theirs in _YARN.items()}
        bounds = {key: float(rope[key]) for key in ("beta_fast", "beta_slow") if rope.get(key)}
        yarn = Yarn.model_validate({**values, **bounds}, strict=False)
    # transformers has called the key by two names.
    depth = config.get("num_nextn_predict_layers", config.get("num_mtp_layers"))
    return {
        "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        "num_kv_heads": config["num_attention_heads"],
        "mla": mla,
        "yarn": yarn,
        "num_mtp_layers": depth or 0,
        "moe": Moe(
            **moe,
            num_dense_layers=config.get("first_k_dense_replace", 0),
            normalize_weights=config.get("norm_topk_prob", True),
            scoring="sigmoid",
            balance="bias",
        ),
    }


def write_deepseek(model: Model) -> dict[str, Any]:
    """The keys of config.json that say this DeepSeek-V3 to transformers; `refuse_what_deepseek_lacks` lets it pass."""
    mla, moe, yarn = model.mla, model.moe, model.yarn
    assert mla is not None
    assert moe is not None
    rope: dict[str, Any] = {"rope_type": "default"}
    if yarn is not None:
        rope = {
            "rope_type": "yarn",
            **{theirs: getattr(yarn, ours) for ours, theirs in _YARN.items()},
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
    return {
        "q_lora_rank": mla.q_lora_rank or None,
        **{key: getattr(mla, key) for key in _MLA},
        **{theirs: getattr(moe, ours) for ours, theirs in _MOE.items()},
        "first_k_dense_replace": moe.num_dense_layers,
        "norm_topk_prob": moe.normalize_weights,
        **{key: value for key, value in _REQUIRED.items() if key != "rms_norm_eps"},
        "num_nextn_predict_layers": model.num_mtp_layers,
        "rope_interleave": True,
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
        "rope_scaling": {**rope, "type": "yarn"} if yarn is not None else None,
    }


def refuse_what_deepseek_lacks(model: Model) -> None:
    """Raises for a model that transformers' DeepSeek-V3 would compute otherwise.

    Args:
        model: of the family.

    Raises:
        DrumlineError: lists what it lacks.
    """
    moe = model.moe
    if moe is None:
        faults = ["model.moe is absent, only a mixture of experts can be exported"]
    else:
        faults = [
            f"model.moe.{key} = {getattr(moe, key)!r}, only {value!r} can be exported"
            for key, value in (("scoring", "sigmoid"), ("shared_expert_gate", False))
            if getattr(moe, key) != value
        ]
        if not moe.num_shared_experts:
            faults.append("model.moe.num_shared_experts = 0, only 1 or more can be exported")
    if model.norm_eps != _EPS:
        faults.append(f"model.norm_eps = {model.norm_eps}, only {_EPS} can be exported")
    if faults:
        raise DrumlineError("\n  ".join(("transformers has no such DeepSeek-V3:", *faults)))


def row_order(name: str, model: Model) -> torch.Tensor | None:
    """Which row of a published weight each of our rows is.

    Args:
        name: logical name.
        model: the shape.

    Returns:
        int64, one a row; None where rows are where they are.
    """
    mla, match = model.mla, _ROTATED.fullmatch(name)
    if mla is None or match is None:
        return None
    turned = mla.qk_rope_head_dim
    heads, still = (1, mla.kv_lora_rank) if match[1] == "kv_a_proj" else (model.num_heads, mla.qk_nope_head_dim)
    rows_HK = torch.arange(heads * (still + turned)).view(heads, still + turned)
    rotated = rows_HK[:, still:]
    return torch.cat((rows_HK[:, :still], rotated[:, 0::2], rotated[:, 1::2]), dim=1).flatten()


def without_absent_modules(model: Model, names: Collection[str]) -> Model:
    """The model without modules of multi-token prediction where a folder has none: transformers drops their weights and
    keeps their number.
    """
    behind = f"model.layers.{model.num_layers}."
    if model.num_mtp_layers and not any(name.startswith(behind) for name in names):
        return model.model_copy(update={"num_mtp_layers": 0})
    return model


def is_copy(name: str, model: Model) -> bool:
    """Whether a tensor of a folder is a module's copy of the embedding or of the output."""
    match = _COPIES.fullmatch(name)
    return match is not None and model.num_layers <= int(match[1]) < model.num_layers + model.num_mtp_layers


def with_biases(model: Model, read: Callable[[str], torch.Tensor]) -> tuple[Model, Callable[[str], torch.Tensor]]:
    """A DeepSeek-V3 as transformers has it: its routers always have a bias, which is 0 where none was trained.

    Args:
        model: of any family.
        read: gives the whole tensor of a logical name.

    Returns:
        Both, changed where need be.
    """
    moe = model.moe
    if model.family != "deepseek_v3" or moe is None or moe.balance == "bias":
        return model, read
    biased = model.model_copy(update={"moe": moe.model_copy(update={"balance": "bias"})})
    return biased, lambda name: torch.zeros(moe.num_experts) if name.endswith(BIAS) else read(name)
