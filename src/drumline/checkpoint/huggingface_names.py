"""Names of parameters here and in transformers' Llama, Qwen3, Qwen3-MoE and DeepSeek-V3.

Names are translated one to one and tensors are never transposed: transformers keeps its models in the layout that is
used here (rotary halves, not pairs; of DeepSeek-V3 see `huggingface_deepseek`). Only experts differ: here a layer's
experts are one stacked tensor [E, out, in], in a Hugging Face folder each has tensors of its own.

    embedding.weight                     model.embed_tokens.weight
    layers.N.attention_norm.weight       model.layers.N.input_layernorm.weight
    layers.N.attention.X.weight          model.layers.N.self_attn.X.weight      X: q_proj ... o_proj q_norm k_norm
    layers.N.mlp_norm.weight             model.layers.N.post_attention_layernorm.weight
    layers.N.mlp.X.weight                model.layers.N.mlp.X.weight            X: gate_proj up_proj down_proj
    layers.N.mlp.router.weight           model.layers.N.mlp.gate.weight
    layers.N.mlp.experts.X.weight [e]    model.layers.N.mlp.experts.e.X.weight
    layers.N.mlp.shared.X.weight         model.layers.N.mlp.shared_experts.X.weight
    layers.N.mlp.router.bias             model.layers.N.mlp.gate.e_score_correction_bias
    layers.N.attention.q_a_norm.weight   model.layers.N.self_attn.q_a_layernorm.weight             kv_a_norm likewise
    layers.N.attention.kv_a_proj.weight  model.layers.N.self_attn.kv_a_proj_with_mqa.weight
    mtp.K.block.X                        as layers.(num_layers + K).X
    mtp.K.merge_proj.weight              model.layers.(num_layers + K).eh_proj.weight
    mtp.K.embedding_norm.weight          model.layers.(num_layers + K).enorm.weight                hidden_norm: hnorm
    mtp.K.norm.weight                    model.layers.(num_layers + K).shared_head.norm.weight
    norm.weight                          model.norm.weight
    output.weight                        lm_head.weight                         left out where it is the embedding's
"""

import re

from drumline.recipe.errors import DrumlineError
from drumline.recipe.shapes import Shape

_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.router": "mlp.gate",
    **{f"attention.{x}": f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{f"attention.{x}": f"self_attn.{x}" for x in ("q_a_proj", "q_b_proj", "kv_b_proj")},
    "attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    **{f"attention.{x}_norm": f"self_attn.{x}_layernorm" for x in ("q_a", "kv_a")},
    **{f"mlp.{x}": f"mlp.{x}" for x in ("gate_proj", "up_proj", "down_proj")},
    **{f"mlp.shared.{x}": f"mlp.shared_experts.{x}" for x in ("gate_proj", "up_proj", "down_proj")},
    # Of a module of multi-token prediction, beside its block.
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "merge_proj": "eh_proj",
    "norm": "shared_head.norm",
}
_ROUTER_BIAS = re.compile(r"layers\.(\d+)\.mlp\.router\.bias")
_ROUTER_BIAS_BACK = re.compile(r"model\.layers\.(\d+)\.mlp\.gate\.e_score_correction_bias")
_EXPERTS = re.compile(r"layers\.(\d+)\.mlp\.experts\.(gate_proj|up_proj|down_proj)\.weight")
_EXPERTS_BACK = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)\.weight")
_OUTSIDE_BACK = {theirs: ours for ours, theirs in _OUTSIDE.items()}
_INSIDE_BACK = {theirs: ours for ours, theirs in _INSIDE.items()}


def in_layers(name: str, num_layers: int) -> str:
    """The name of a parameter of a module of multi-token prediction as that of a layer behind the last, where folders
    have it; another name as it is.
    """
    return re.sub(r"^mtp\.(\d+)\.(block\.)?", lambda match: f"layers.{num_layers + int(match[1])}.", name)


def to_huggingface(name: str, expert: int | None = None) -> str:
    """The name that transformers gives to one of our parameters, in all families.

    Args:
        name: logical name, `in_layers`.
        expert: which of a stack of experts.

    Returns:
        The name in a Hugging Face folder.

    Raises:
        DrumlineError: no such parameter.
    """
    stacked = _EXPERTS.fullmatch(name)
    if stacked and expert is not None:
        return f"model.layers.{stacked[1]}.mlp.experts.{expert}.{stacked[2]}.weight"
    bias = _ROUTER_BIAS.fullmatch(name)
    if bias:
        return f"model.layers.{bias[1]}.mlp.gate.e_score_correction_bias"
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    inside = _INSIDE.get(match[2]) if match else None
    if match and inside:
        return f"model.layers.{match[1]}.{inside}.weight"
    if name not in _OUTSIDE:
        raise DrumlineError(f"{name!r} is no parameter of a decoder that transformers has")
    return _OUTSIDE[name]


def from_huggingface(name: str) -> str:
    """Our name of a parameter of transformers' Llama, Qwen3, Qwen3-MoE or DeepSeek-V3.

    Args:
        name: as in a Hugging Face folder.

    Returns:
        The logical name, `in_layers`; for a tensor of one expert, that of the stack which it is a part of.

    Raises:
        DrumlineError: there is no such parameter in the models here.
    """
    expert = _EXPERTS_BACK.fullmatch(name)
    if expert:
        return f"layers.{expert[1]}.mlp.experts.{expert[2]}.weight"
    bias = _ROUTER_BIAS_BACK.fullmatch(name)
    if bias:
        return f"layers.{bias[1]}.mlp.router.bias"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    inside = _INSIDE_BACK.get(match[2]) if match else None
    if match and inside:
        return f"layers.{match[1]}.{inside}.weight"
    if name not in _OUTSIDE_BACK:
        raise DrumlineError(f"{name!r} is no parameter of transformers' Llama, Qwen3, Qwen3-MoE or DeepSeek-V3")
    return _OUTSIDE_BACK[name]


def is_stacked(name: str) -> bool:
    """Whether a logical tensor holds all experts of a layer, so that a folder has one tensor for each."""
    return _EXPERTS.fullmatch(name) is not None


def stored_tensors(name: str, shape: Shape) -> dict[str, Shape]:
    """The tensors of a Hugging Face folder that together are a logical tensor.

    Args:
        name: logical name, `in_layers`.
        shape: of the logical tensor.

    Returns:
        Name in the folder -> shape, in the order in which they are stacked; one, unless it holds experts.
    """
    if not is_stacked(name):
        return {to_huggingface(name): shape}
    return {to_huggingface(name, expert): shape[1:] for expert in range(shape[0])}
