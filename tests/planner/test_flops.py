"""FLOPs a token; the oracles are torch's own counter on `transformers`' Llama, and the papers' formulas."""

import pytest
import torch
from tests.models.deepseek_reference import DEEPSEEK, hf_config
from tests.models.moe_reference import with_moe
from torch.utils.flop_counter import FlopCounterMode
from transformers import DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from drumline.planner import flops_per_token
from drumline.recipe import load, num_active_parameters, num_parameters
from drumline.recipe.sections import Model

SMALL = Model(
    num_layers=3, dim=48, num_heads=6, num_kv_heads=2, head_dim=10, hidden_dim=80, vocab_size=96, max_seq_len=64
)


@pytest.mark.parametrize("is_tied", [False, True])
def test_full_attention_flops_are_what_torch_counts(is_tied):
    B, T = 2, 32
    config = LlamaConfig(
        hidden_size=SMALL.dim,
        num_hidden_layers=SMALL.num_layers,
        num_attention_heads=SMALL.num_heads,
        num_key_value_heads=SMALL.num_kv_heads,
        head_dim=SMALL.head_dim,
        intermediate_size=SMALL.hidden_dim,
        vocab_size=SMALL.vocab_size,
        tie_word_embeddings=is_tied,
        attn_implementation="eager",
    )
    reference = LlamaForCausalLM(config)
    hidden_BTD = torch.ones(B, T, SMALL.dim, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        reference(inputs_embeds=hidden_BTD).logits.sum().backward()
    rotary = 2 * SMALL.head_dim // 2 * T * B  # transformers computes angles by a matmul; no part of the model's work
    counted = counter.get_total_flops() - rotary
    ours = flops_per_token(SMALL.model_copy(update={"tie_embeddings": is_tied}), T, is_causal=False)
    assert ours.total * B * T == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize("T", [1, 2, 7, 16])
def test_causal_attention_counts_the_keys_that_each_query_sees(T):
    pairs = sum(query + 1 for query in range(T))
    per_pair = 3 * 2 * 2 * SMALL.num_layers * SMALL.num_heads * SMALL.head_dim
    assert flops_per_token(SMALL, T).attention * T == pairs * per_pair


def test_linear_flops_are_six_per_weight_without_the_lookup():
    model = load("llama3-8b").model
    norms = model.dim * (2 * model.num_layers + 1)
    weights = num_parameters(model) - model.vocab_size * model.dim - norms
    assert flops_per_token(model, 8192).linear == 6 * weights


def test_full_attention_is_palms_formula():
    model, T = load("llama3-70b").model, 8192
    palm = 12 * model.num_layers * model.num_heads * model.head_dim * T
    assert flops_per_token(model, T, is_causal=False).attention == palm


def test_of_experts_those_count_that_a_token_is_sent_to():
    model, T = load("qwen3-30b-a3b").model, 4096
    norms = model.dim * (2 * model.num_layers + 1) + 2 * model.head_dim * model.num_layers
    weights = num_active_parameters(model) - model.vocab_size * model.dim - norms
    assert flops_per_token(model, T).linear == 6 * weights


def test_a_mixture_has_the_flops_of_a_dense_model_as_wide_as_its_chosen_experts_and_of_its_router():
    mixture = load("qwen3-moe-debug").model
    moe = mixture.moe
    assert moe is not None
    wide = {"hidden_dim": moe.experts_per_token * moe.expert_hidden_dim, "moe": None}
    dense = flops_per_token(mixture.model_copy(update=wide), 256)
    routers = 6 * mixture.num_layers * moe.num_experts * mixture.dim
    assert flops_per_token(mixture, 256).total == dense.total + routers


def test_latent_attention_flops_are_what_torch_counts():
    B, T = 2, 32
    model = DEEPSEEK.model_copy(update={"moe": None, "num_mtp_layers": 0})
    # As many dense layers as layers: their experts are none of a token's work.
    reference = DeepseekV3ForCausalLM(hf_config(with_moe(DEEPSEEK, num_dense_layers=3), attn_implementation="eager"))
    hidden_BTD = torch.ones(B, T, model.dim, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        reference(inputs_embeds=hidden_BTD).logits.sum().backward()
    counted = counter.get_total_flops() - 2 * 8 // 2 * T * B  # angles by a matmul; no part of the model's work
    assert flops_per_token(model, T, is_causal=False).total * B * T == pytest.approx(counted, rel=1e-3)


def test_a_module_of_multi_token_prediction_is_a_layer_its_merge_and_an_output():
    one, two = (DEEPSEEK.model_copy(update={"num_layers": layers}) for layers in (3, 4))
    layer = flops_per_token(two, 256).total - flops_per_token(one, 256).total
    merge, output = 6 * 2 * one.dim**2, 6 * one.dim * one.vocab_size
    ahead = one.model_copy(update={"num_mtp_layers": 2})
    assert flops_per_token(ahead, 256).total == flops_per_token(one, 256).total + 2 * (layer + merge + output)
