"""Hugging Face's implementation of the same shapes, as an oracle; names are mapped here by hand, apart from the code
under test."""

import torch
import transformers

from drumline.recipe.sections import Model, RopeScaling

LLAMA = Model(
    family="llama3",
    num_layers=2,
    dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_dim=96,
    vocab_size=101,
    rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=64),
    init_std=0.08,
)
QWEN = Model(
    family="qwen3",
    num_layers=2,
    dim=64,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    hidden_dim=96,
    vocab_size=101,
    norm_eps=1e-6,
    rope_theta=1e6,
    qk_norm=True,
    tie_embeddings=True,
    init_std=0.08,
)

_HF_NAMES = (
    ("embedding.", "model.embed_tokens."),
    ("layers.", "model.layers."),
    ("attention_norm.", "input_layernorm."),
    ("mlp_norm.", "post_attention_layernorm."),
    ("attention.", "self_attn."),
    ("output.", "lm_head."),
)


def hf_name(name: str) -> str:
    """The transformers name of one of our parameters."""
    for ours, theirs in _HF_NAMES:
        name = name.replace(ours, theirs)
    return "model." + name if name.startswith("norm.") else name


def hf_model(model: Model) -> transformers.PreTrainedModel:
    """transformers' model of a shape."""
    shared = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.hidden_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "attn_implementation": "sdpa",  # the eager form takes its softmax in fp32 even when the model is fp64
    }
    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": model.rope_scaling.factor,
            "low_freq_factor": model.rope_scaling.low_freq_factor,
            "high_freq_factor": model.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling.original_max_seq_len,
        }
    kind = "Llama" if model.family == "llama3" else "Qwen3"
    config = getattr(transformers, f"{kind}Config")(**shared, rope_parameters=rope)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def hf_twin(decoder) -> transformers.PreTrainedModel:
    """transformers' model with the decoder's weights and dtype; in fp64 its norms, always fp32, become torch's own."""
    dtype = next(decoder.parameters()).dtype
    twin = hf_model(decoder.shape).to(dtype)
    if dtype == torch.float64:
        for path, norm in list(twin.named_modules()):
            if type(norm).__name__.endswith("RMSNorm"):
                double = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=dtype)
                twin.get_submodule(path.rpartition(".")[0]).register_module(path.rpartition(".")[2], double)
    state = {hf_name(name): tensor for name, tensor in decoder.state_dict().items()}
    missing, unexpected = twin.load_state_dict(state, strict=False)
    left_out = set(missing) - {"lm_head.weight"} if decoder.shape.tie_embeddings else set(missing)
    if left_out or unexpected:
        raise AssertionError(f"names differ: missing {left_out}, unexpected {unexpected}")
    return twin


def make(
    model: Model,
    *,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    seed: int = 0,
    **parts,
):
    """A real decoder of that shape with random norms too, so that no factor of 1 hides a mistake."""
    from drumline.models import build, initialize

    decoder = build(model, compute_dtype=compute_dtype or dtype, **parts)
    decoder.to_empty(device="cpu")
    initialize(decoder, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return decoder.to(dtype)


def random_tokens(num_rows: int, num_tokens: int, vocab_size: int, seed: int = 1) -> torch.Tensor:
    """int64 tokens [B, T]."""
    return torch.randint(vocab_size, (num_rows, num_tokens), generator=torch.Generator().manual_seed(seed))
