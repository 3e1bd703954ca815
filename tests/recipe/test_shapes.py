"""Shapes and counts of parameters; the oracles are the published counts and `transformers` on the meta device."""

import math

import pytest
import torch
from tests.models import deepseek_reference, moe_reference
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from drumline.models import build
from drumline.recipe import builtin_names, load, num_active_parameters, num_parameters, parameter_shapes
from drumline.recipe.sections import Model

PUBLISHED = {
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}

# logical name -> name in transformers
TRANSFORMERS = {
    "embedding.": "model.embed_tokens.",
    "layers.": "model.layers.",
    ".attention_norm.": ".input_layernorm.",
    ".attention.": ".self_attn.",
    ".mlp_norm.": ".post_attention_layernorm.",
    "norm.weight": "model.norm.weight",
    "output.": "lm_head.",
}


def transformers_name(name: str) -> str:
    if name == "norm.weight":
        return TRANSFORMERS[name]
    for ours, theirs in TRANSFORMERS.items():
        if ours != "norm.weight":
            name = name.replace(ours, theirs)
    return name


def reference_of(model: Model):
    return deepseek_reference if model.mla is not None else moe_reference


def reference_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    if model.moe is not None:
        return shapes_of(reference_of(model).hf_config(model))
    kind = Qwen3Config if model.family == "qwen3" else LlamaConfig
    return shapes_of(
        kind(
            hidden_size=model.dim,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            intermediate_size=model.hidden_dim,
            vocab_size=model.vocab_size,
            tie_word_embeddings=model.tie_embeddings,
        )
    )


def shapes_of(config) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in reference.named_parameters()}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_a_built_in_model_has_the_published_number_of_parameters(name, count):
    assert num_parameters(load(name).model) == count


@pytest.mark.parametrize("name", builtin_names())
def test_shapes_are_those_of_transformers(name):
    model = load(name).model
    if model.moe is None:
        shapes = {transformers_name(key): shape for key, shape in parameter_shapes(model).items()}
    else:
        empty = {name: torch.empty(shape, device="meta") for name, shape in parameter_shapes(model).items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in reference_of(model).hf_state(empty).items()}
    assert shapes == reference_shapes(model)


@pytest.mark.parametrize(("name", "billions"), [("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22)])
def test_active_parameters_are_those_of_the_models_name(name, billions):
    # Qwen3's report, arXiv:2505.09388, table 2, counts the embedding too.
    assert num_active_parameters(load(name).model) == pytest.approx(billions * 1e9, rel=0.02)


def test_deepseek_v3_has_its_published_sizes():
    # arXiv:2412.19437, section 1: 671B in all, 37B for a token. The published folder is of 685B with the module of
    # multi-token prediction, which has copies of the embedding and of the output there.
    whole = load("deepseek-v3").model
    alone = load("deepseek-v3", ["model.num_mtp_layers=0"]).model
    assert num_parameters(alone) == pytest.approx(671e9, rel=1e-3)
    assert num_active_parameters(alone) == pytest.approx(37e9, rel=0.02)
    assert num_parameters(whole) + 2 * whole.vocab_size * whole.dim == pytest.approx(685e9, rel=1e-3)


def test_every_parameter_of_a_dense_model_is_active():
    model = load("qwen3-8b").model
    assert num_active_parameters(model) == num_parameters(model)


def test_with_all_experts_chosen_every_parameter_is_active():
    model = load("qwen3-moe-debug", ["model.moe.experts_per_token=8", "model.moe.num_shared_experts=2"]).model
    assert num_active_parameters(model) == num_parameters(model)


@pytest.mark.parametrize("keys", [(), ("model.moe.num_shared_experts=2", "model.moe.shared_expert_gate=true")])
@pytest.mark.parametrize("num_dense", [0, 1, 3])
def test_shapes_are_those_of_the_model_that_is_built(num_dense, keys):
    model = load("qwen3-moe-debug", [f"model.moe.num_dense_layers={num_dense}", *keys]).model
    built = {name: tuple(parameter.shape) for name, parameter in build(model).named_parameters()}
    assert built == parameter_shapes(model)


@pytest.mark.parametrize("keys", [(), ("model.mla.q_lora_rank=0", "model.num_mtp_layers=2"), ("model.moe=none",)])
def test_shapes_of_latent_attention_are_those_of_the_model_that_is_built(keys):
    model = load("deepseek-v3-debug", keys).model
    built = {name: tuple(parameter.shape) for name, parameter in build(model).named_parameters()}
    assert built == parameter_shapes(model)


@pytest.mark.parametrize("name", builtin_names())
def test_the_count_is_the_sum_of_the_shapes(name):
    model = load(name).model
    assert num_parameters(model) == sum(math.prod(shape) for shape in parameter_shapes(model).values())
