"""transformers' mixtures of experts of the same shapes, as oracles; names are mapped here by hand."""

import torch
import transformers
from tests.models.hf_reference import QWEN, hf_name

from drumline.recipe.sections import Model, Moe

MOE = QWEN.model_copy(
    update={
        "tie_embeddings": False,
        "hidden_dim": 96,
        "moe": Moe(num_experts=8, experts_per_token=3, expert_hidden_dim=32, num_dense_layers=1),
    }
)


def with_moe(model: Model = MOE, **changes) -> Model:
    """The model with other keys of its `moe` section."""
    assert model.moe is not None
    return model.model_copy(update={"moe": model.moe.model_copy(update=changes)})


def hf_config(model: Model, **extra) -> transformers.Qwen3MoeConfig:
    moe = model.moe
    assert moe is not None
    return transformers.Qwen3MoeConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.hidden_dim,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=512,
        rms_norm_eps=model.norm_eps,
        tie_word_embeddings=model.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.experts_per_token,
        moe_intermediate_size=moe.expert_hidden_dim,
        norm_topk_prob=moe.normalize_weights,
        mlp_only_layers=list(range(moe.num_dense_layers)),
        attn_implementation="sdpa",
        experts_implementation="eager",  # a loop over experts, apart from what is used here
        **extra,
    )


def hf_state(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our weights (or their gradients) under transformers' names: it stacks gate and up in one tensor."""
    state = {}
    for name, tensor in named.items():
        theirs = hf_name(name).replace("mlp.router.weight", "mlp.gate.weight")
        if ".mlp.experts.gate_proj." in theirs:
            both = (tensor, named[name.replace("gate_proj", "up_proj")])
            state[theirs.replace("gate_proj.weight", "gate_up_proj")] = torch.cat(both, dim=1)
        elif ".mlp.experts.down_proj." in theirs:
            state[theirs.removesuffix(".weight")] = tensor
        elif ".mlp.experts.up_proj." not in theirs:
            state[theirs] = tensor
    return state


def hf_twin(decoder, **extra) -> transformers.Qwen3MoeForCausalLM:
    """transformers' model with the decoder's weights and dtype; fp64 norms are torch's own: theirs are fp32."""
    dtype = next(decoder.parameters()).dtype
    twin = transformers.Qwen3MoeForCausalLM(hf_config(decoder.shape, **extra)).to(dtype)
    if dtype == torch.float64:
        for path, norm in list(twin.named_modules()):
            if type(norm).__name__.endswith("RMSNorm"):
                double = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=dtype)
                twin.get_submodule(path.rpartition(".")[0]).register_module(path.rpartition(".")[2], double)
    twin.load_state_dict(hf_state(dict(decoder.named_parameters())))
    return twin
