"""The model's section of a recipe: its shape, its attention, its experts, and what it predicts."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from drumline.recipe.section import Natural, Positive, Section


class RopeScaling(Section):
    """Llama 3.1's scaling of rotary frequencies (arXiv:2407.21783)."""

    factor: Annotated[float, Field(ge=1.0)] = Field(default=8.0, description="By how much low frequencies are slowed.")
    low_freq_factor: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Wavelengths above original_max_seq_len / this are slowed fully."
    )
    high_freq_factor: Annotated[float, Field(gt=0)] = Field(
        default=4.0, description="Wavelengths below original_max_seq_len / this are left alone."
    )
    original_max_seq_len: Positive = Field(
        default=8192, description="Sequence length of the pre-training before scaling, tokens."
    )


class Yarn(Section):
    """YaRN's scaling of rotary frequencies and of the softmax (arXiv:2309.00071), as DeepSeek-V3 has it."""

    factor: Annotated[float, Field(ge=1.0)] = Field(
        default=40.0, description="By how much frequencies are slowed that turn rarely within original_max_seq_len."
    )
    original_max_seq_len: Positive = Field(
        default=4096, description="Sequence length of the pre-training before scaling, tokens."
    )
    beta_fast: Annotated[float, Field(gt=0)] = Field(
        default=32.0,
        description="Frequencies that turn at least this often within original_max_seq_len are left alone.",
    )
    beta_slow: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Those that turn at most this often are slowed fully; in between by interpolation."
    )
    mscale: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Rotary parts grow by m(this) / m(mscale_all_dim), where m(s) = 0.1 s ln(factor) + 1."
    )
    mscale_all_dim: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="The softmax's scale grows by the square of m(this)."
    )


class Mla(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values come from a narrow latent."""

    q_lora_rank: Natural = Field(default=0, description="Width of the queries' latent; 0: queries have none.")
    kv_lora_rank: Positive = Field(default=64, description="Width R of the latent that keys and values come from.")
    qk_nope_head_dim: Positive = Field(default=32, description="Part of a query or key head without position; even.")
    qk_rope_head_dim: Positive = Field(
        default=16, description="Rotated part of a query or key head, whose key all heads share; even."
    )
    v_head_dim: Positive = Field(default=32, description="Width of a value head; at most model.head_dim.")


class Moe(Section):
    """A mixture of experts in place of the feed-forward layers: who is chosen, how, and how the load is balanced."""

    num_experts: Positive = Field(default=8, description="Routed experts E of a layer.")
    experts_per_token: Positive = Field(default=2, description="Experts that each token is sent to.")
    expert_hidden_dim: Positive = Field(default=256, description="Width F of one expert's SwiGLU hidden layer.")
    num_dense_layers: Natural = Field(
        default=0, description="First layers that keep a dense feed-forward of model.hidden_dim."
    )
    num_shared_experts: Natural = Field(
        default=0, description="Experts that every token passes; together one SwiGLU of this times expert_hidden_dim."
    )
    shared_expert_gate: bool = Field(
        default=False, description="A sigmoid of the token scales the shared experts' output (Qwen2-MoE)."
    )
    scoring: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="How router logits become scores: softmax (Qwen3) or sigmoid (DeepSeek-V3)."
    )
    normalize_weights: bool = Field(default=True, description="The weights of a token's chosen experts sum to 1.")
    routed_scaling: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Factor on the routed experts' weights, after they are normalized."
    )
    num_expert_groups: Positive = Field(
        default=1, description="Groups that neighbouring experts form, such as those of one node; divides num_experts."
    )
    groups_per_token: Positive = Field(default=1, description="Groups that a token's experts may come from.")
    balance: Literal["none", "aux_loss", "bias"] = Field(
        default="none", description="What evens the load: nothing, a loss, or a bias on the choice without a loss."
    )
    aux_loss_coefficient: Annotated[float, Field(ge=0)] = Field(
        default=0.001, description="For aux_loss: its weight beside the cross-entropy."
    )
    bias_update_speed: Annotated[float, Field(ge=0)] = Field(
        default=0.001, description="For bias: what a step adds to it, or takes from it."
    )
    capacity_factor: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="An expert takes at most this times its even share of a sequence, the rest is dropped; 0: never.",
    )


class Model(Section):
    """The shape of the model and how it is computed on one device."""

    family: Literal["llama3", "qwen3", "deepseek_v3"] = Field(
        default="llama3", description="Which architecture; decides names on export."
    )
    num_layers: Positive = Field(default=6, description="Transformer blocks.")
    dim: Positive = Field(default=256, description="Model width D.")
    num_heads: Positive = Field(default=16, description="Query heads H.")
    num_kv_heads: Positive = Field(default=16, description="Key and value heads G; must divide num_heads.")
    head_dim: Positive = Field(default=16, description="Width K of one query or key head; even.")
    hidden_dim: Positive = Field(default=768, description="Width F of the SwiGLU hidden layer.")
    vocab_size: Positive = Field(default=2048, description="Vocabulary V.")
    max_seq_len: Positive = Field(default=131072, description="Longest sequence the model is meant for, tokens.")
    norm_eps: Annotated[float, Field(gt=0)] = Field(default=1e-5, description="Epsilon inside RMSNorm's square root.")
    rope_theta: Annotated[float, Field(gt=0)] = Field(default=500000.0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = Field(
        default=None, description="Llama 3.1's frequency scaling; none when absent."
    )
    yarn: Yarn | None = Field(default=None, description="YaRN's scaling, of deepseek_v3; none when absent.")
    qk_norm: bool = Field(default=False, description="RMSNorm of each query and key head before RoPE (Qwen3).")
    tie_embeddings: bool = Field(default=False, description="Output projection shares the embedding's weight.")
    init_std: Annotated[float, Field(gt=0)] = Field(default=0.02, description="Standard deviation of initial weights.")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="Share of what attention and MLP add to the residual stream that is dropped in training.",
    )
    attention: Literal["auto", "sdpa", "flex", "kernel"] = Field(
        default="auto",
        description="What computes attention; auto: the own CPU kernel where it builds, else flex on CUDA, else sdpa.",
    )
    moe: Moe | None = Field(default=None, description="Mixture of experts; a dense model when absent.")
    mla: Mla | None = Field(
        default=None, description="Multi-head latent attention; grouped-query attention when absent."
    )
    num_mtp_layers: Natural = Field(
        default=0, description="Multi-token prediction: modules that each predict one token further ahead."
    )
    mtp_loss_weight: Annotated[float, Field(ge=0)] = Field(
        default=0.3, description="Weight of the mean of these modules' losses beside the next token's."
    )

    @field_validator("rope_scaling", "yarn", "moe", "mla", mode="before")
    @classmethod
    def _none_in_words(cls, value: Any) -> Any:
        # TOML has no null; without a word for it a recipe could not take away what it inherits.
        return None if value == "none" else value

    @property
    def shares_embedding(self) -> bool:
        """Whether the end of the model needs the embedding as its beginning does: for a tied output, or to predict
        further tokens.
        """
        return self.tie_embeddings or self.num_mtp_layers > 0

    def is_moe_layer(self, index: int) -> bool:
        """Whether the block of this index, from 0, has experts."""
        return self.moe is not None and index >= self.moe.num_dense_layers
