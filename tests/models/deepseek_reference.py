"""transformers' DeepSeek-V3 of the same shapes, as an oracle; names are mapped here by hand, apart from the code under
test. Its rotary pairs are set to halves, as they lie here; that published weights lie otherwise is the importer's."""

import torch
import transformers
from tests.models.moe_reference import hf_state as moe_state

from drumline.recipe.sections import Mla, Model, Moe, Yarn

DEEPSEEK = Model(
    family="deepseek_v3",
    num_layers=3,
    dim=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=24,
    hidden_dim=96,
    vocab_size=101,
    norm_eps=1e-6,
    rope_theta=10000.0,
    init_std=0.08,
    mla=Mla(q_lora_rank=40, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
    moe=Moe(
        num_experts=8,
        experts_per_token=3,
        expert_hidden_dim=32,
        num_dense_layers=1,
        num_shared_experts=2,
        scoring="sigmoid",
        routed_scaling=2.5,
        num_expert_groups=4,
        groups_per_token=2,
        balance="bias",
    ),
)
YARN = Yarn(factor=4.0, original_max_seq_len=32, beta_fast=4.0, mscale=0.8, mscale_all_dim=0.6)


def with_mla(model: Model = DEEPSEEK, **changes) -> Model:
    """The model with other keys of its `mla` section, and the head width that follows."""
    assert model.mla is not None
    mla = model.mla.model_copy(update=changes)
    return model.model_copy(update={"mla": mla, "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim})


def hf_config(model: Model, **extra) -> transformers.DeepseekV3Config:
    moe, mla, yarn = model.moe, model.mla, model.yarn
    assert moe is not None
    assert mla is not None
    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    if yarn is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_seq_len,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
    return transformers.DeepseekV3Config(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.hidden_dim,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        max_position_embeddings=512 if yarn is None else int(yarn.factor * yarn.original_max_seq_len),
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings,
        rope_parameters=rope,
        q_lora_rank=mla.q_lora_rank or None,
        kv_lora_rank=mla.kv_lora_rank,
        qk_nope_head_dim=mla.qk_nope_head_dim,
        qk_rope_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        n_routed_experts=moe.num_experts,
        n_shared_experts=moe.num_shared_experts,
        num_experts_per_tok=moe.experts_per_token,
        moe_intermediate_size=moe.expert_hidden_dim,
        routed_scaling_factor=moe.routed_scaling,
        n_group=moe.num_expert_groups,
        topk_group=moe.groups_per_token,
        norm_topk_prob=moe.normalize_weights,
        first_k_dense_replace=moe.num_dense_layers,
        num_nextn_predict_layers=model.num_mtp_layers,
        **({"rope_interleave": False, "attn_implementation": "sdpa", "experts_implementation": "eager"} | extra),
    )


_HF_NAMES = {
    "mlp.shared.": "mlp.shared_experts.",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    "self_attn.q_a_norm.": "self_attn.q_a_layernorm.",
    "self_attn.kv_a_norm.": "self_attn.kv_a_layernorm.",
    "self_attn.kv_a_proj.": "self_attn.kv_a_proj_with_mqa.",
}


def hf_state(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our weights (or their gradients) of the model's layers under transformers' names."""
    state = {}
    for name, tensor in moe_state({name: x for name, x in named.items() if not name.startswith("mtp.")}).items():
        for ours, theirs in _HF_NAMES.items():
            name = name.replace(ours, theirs)
        state[name] = tensor
    return state


def hf_twin(decoder, **extra) -> transformers.DeepseekV3ForCausalLM:
    """transformers' model with the decoder's weights and dtype; fp64 norms are torch's own: theirs are fp32."""
    dtype = next(decoder.parameters()).dtype
    twin = transformers.DeepseekV3ForCausalLM(hf_config(decoder.shape, **extra)).to(dtype)
    if dtype == torch.float64:
        exact_norms(twin)
    twin.load_state_dict(hf_state(dict(decoder.state_dict())))
    return twin


def exact_norms(module: torch.nn.Module) -> None:
    """Puts torch's own norm in the place of transformers', which is fp32 always."""
    for path, norm in list(module.named_modules()):
        if hasattr(norm, "variance_epsilon"):
            double = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=torch.float64)
            module.get_submodule(path.rpartition(".")[0]).register_module(path.rpartition(".")[2], double)
