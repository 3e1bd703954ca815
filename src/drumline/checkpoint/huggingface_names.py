"""Names of parameters here and in transformers' Llama, Qwen3 and Qwen3-MoE.

Names are translated one to one and tensors are never transposed or permuted: transformers keeps its models in the
layout that is used here (rotary halves, not pairs). Only experts differ: here a layer's experts are one stacked tensor
[E, out, in], in a Hugging Face folder each has tensors of its own.

    embedding.weight                     model.embed_tokens.weight
    layers.N.attention_norm.weight       model.layers.N.input_layernorm.weight
    layers.N.attention.X.weight          model.layers.N.self_attn.X.weight      X: q_proj ... o_proj q_norm k_norm
    layers.N.mlp_norm.weight             model.layers.N.post_attention_layernorm.weight
    layers.N.mlp.X.weight                model.layers.N.mlp.X.weight            X: gate_proj up_proj down_proj
    layers.N.mlp.router.weight           model.layers.N.mlp.gate.weight
    layers.N.mlp.experts.X.weight [e]    model.layers.N.mlp.experts.e.X.weight
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
    **{f"mlp.{x}": f"mlp.{x}" for x in ("gate_proj", "up_proj", "down_proj")},
}
_EXPERTS = re.compile(r"layers\.(\d+)\.mlp\.experts\.(gate_proj|up_proj|down_proj)\.weight")
_EXPERTS_BACK = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)\.weight")
_OUTSIDE_BACK = {theirs: ours for ours, theirs in _OUTSIDE.items()}
_INSIDE_BACK = {theirs: ours for ours, theirs in _INSIDE.items()}


def to_huggingface(name: str, expert: int | None = None) -> str:
    """The name that transformers gives to one of our parameters, in all families.

    Args:
        name: logical name.
        expert: which of a stack of experts.

    Returns:
        The name in a Hugging Face folder.

    Raises:
        DrumlineError: no such parameter.
    """
    stacked = _EXPERTS.fullmatch(name)
    if stacked and expert is not None:
        return f"model.layers.{stacked[1]}.mlp.experts.{expert}.{stacked[2]}.weight"
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    inside = _INSIDE.get(match[2]) if match else None
    if match and inside:
        return f"model.layers.{match[1]}.{inside}.weight"
    if name not in _OUTSIDE:
        raise DrumlineError(f"{name!r} is no parameter of a decoder that transformers has")
    return _OUTSIDE[name]


def from_huggingface(name: str) -> str:
    """Our name of a parameter of transformers' Llama, Qwen3 or Qwen3-MoE.

    Args:
        name: as in a Hugging Face folder.

    Returns:
        The logical name; for a tensor of one expert, that of the stack which it is a part of.

    Raises:
        DrumlineError: there is no such parameter in the models here.
    """
    expert = _EXPERTS_BACK.fullmatch(name)
    if expert:
        return f"layers.{expert[1]}.mlp.experts.{expert[2]}.weight"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    inside = _INSIDE_BACK.get(match[2]) if match else None
    if match and inside:
        return f"layers.{match[1]}.{inside}.weight"
    if name not in _OUTSIDE_BACK:
        raise DrumlineError(f"{name!r} is no parameter of transformers' Llama, Qwen3 or Qwen3-MoE")
    return _OUTSIDE_BACK[name]


def is_stacked(name: str) -> bool:
    """Whether a logical tensor holds all experts of a layer, so that a folder has one tensor for each."""
    return _EXPERTS.fullmatch(name) is not None


def stored_tensors(name: str, shape: Shape) -> dict[str, Shape]:
    """The tensors of a Hugging Face folder that together are a logical tensor.

    Args:
        name: logical name.
        shape: of the logical tensor.

    Returns:
        Name in the folder -> shape, in the order in which they are stacked; one, unless it holds experts.
    """
    if not is_stacked(name):
        return {to_huggingface(name): shape}
    return {to_huggingface(name, expert): shape[1:] for expert in range(shape[0])}
