"""The shapes of a model's parameters by logical name: what builds the model, what is counted, and what is costed.

Legend: D model width, H query heads, G key/value heads, K head width, F hidden width, V vocabulary, E experts, R width
of the latent of keys and values, Q of that of queries.
"""

import math
from collections.abc import Callable

from drumline.recipe.sections import Mla, Model

Shape = tuple[int, ...]


def block_shapes(model: Model, index: int = 0) -> dict[str, Shape]:
    """Parameters of one block.

    Args:
        model: the model's section.
        index: of the block, from 0; it decides only whether the block has experts.

    Returns:
        Name within the block -> shape, in the order of the forward pass. A linear's weight is (out, in), that of all
        experts of a layer (E, out, in).
    """
    D = model.dim
    return {
        "attention_norm.weight": (D,),
        **(grouped_attention_shapes(model) if model.mla is None else latent_attention_shapes(model, model.mla)),
        "mlp_norm.weight": (D,),
        **(moe_shapes(model) if model.is_moe_layer(index) else swiglu_shapes("mlp", D, model.hidden_dim)),
    }


def grouped_attention_shapes(model: Model) -> dict[str, Shape]:
    """Parameters of grouped-query attention in a block."""
    D, K = model.dim, model.head_dim
    HK, GK = model.num_heads * K, model.num_kv_heads * K
    shapes: dict[str, Shape] = {
        "attention.q_proj.weight": (HK, D),
        "attention.k_proj.weight": (GK, D),
        "attention.v_proj.weight": (GK, D),
        "attention.o_proj.weight": (D, HK),
    }
    if model.qk_norm:
        shapes |= {"attention.q_norm.weight": (K,), "attention.k_norm.weight": (K,)}
    return shapes


def latent_attention_shapes(model: Model, mla: Mla) -> dict[str, Shape]:
    """Parameters of multi-head latent attention in a block."""
    D, H, Q, R = model.dim, model.num_heads, mla.q_lora_rank, mla.kv_lora_rank
    key = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    queries: dict[str, Shape] = {"attention.q_proj.weight": (H * key, D)}
    if Q:
        queries = {
            "attention.q_a_proj.weight": (Q, D),
            "attention.q_a_norm.weight": (Q,),
            "attention.q_b_proj.weight": (H * key, Q),
        }
    return {
        **queries,
        "attention.kv_a_proj.weight": (R + mla.qk_rope_head_dim, D),
        "attention.kv_a_norm.weight": (R,),
        "attention.kv_b_proj.weight": (H * (mla.qk_nope_head_dim + mla.v_head_dim), R),
        "attention.o_proj.weight": (D, H * mla.v_head_dim),
    }


def mtp_shapes(model: Model) -> dict[str, Shape]:
    """Parameters of one module of multi-token prediction; the embedding and the output are the model's own."""
    D = model.dim
    block = block_shapes(model, model.num_layers)
    return {
        "embedding_norm.weight": (D,),
        "hidden_norm.weight": (D,),
        "merge_proj.weight": (D, 2 * D),
        **{f"block.{name}": shape for name, shape in block.items()},
        "norm.weight": (D,),
    }


def swiglu_shapes(prefix: str, dim: int, hidden_dim: int, *stacked: int) -> dict[str, Shape]:
    """Parameters of SwiGLU layers from `dim` through `hidden_dim`, stacked along the further dims."""
    return {
        f"{prefix}.gate_proj.weight": (*stacked, hidden_dim, dim),
        f"{prefix}.up_proj.weight": (*stacked, hidden_dim, dim),
        f"{prefix}.down_proj.weight": (*stacked, dim, hidden_dim),
    }


def moe_shapes(model: Model) -> dict[str, Shape]:
    """Parameters of the mixture of experts in a block; empty for a dense model."""
    moe, D = model.moe, model.dim
    if moe is None:
        return {}
    shapes: dict[str, Shape] = {"mlp.router.weight": (moe.num_experts, D)}
    shapes |= swiglu_shapes("mlp.experts", D, moe.expert_hidden_dim, moe.num_experts)
    if moe.num_shared_experts:
        shapes |= swiglu_shapes("mlp.shared", D, moe.num_shared_experts * moe.expert_hidden_dim)
        if moe.shared_expert_gate:
            shapes["mlp.shared_gate.weight"] = (1, D)
    return shapes


def parameter_shapes(model: Model) -> dict[str, Shape]:
    """Every parameter of a model.

    Args:
        model: the model's section.

    Returns:
        Logical name -> shape; a tied output has no name of its own.
    """
    shapes: dict[str, Shape] = {"embedding.weight": (model.vocab_size, model.dim)}
    for index in range(model.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in block_shapes(model, index).items()}
    shapes["norm.weight"] = (model.dim,)
    if not model.tie_embeddings:
        shapes["output.weight"] = (model.vocab_size, model.dim)
    for depth in range(model.num_mtp_layers):
        shapes |= {f"mtp.{depth}.{name}": shape for name, shape in mtp_shapes(model).items()}
    return shapes


def num_parameters(model: Model) -> int:
    """Elements of all parameters, a tied one once.

    Args:
        model: the model's section.

    Returns:
        The count, without listing the layers one by one.
    """
    return _count(model, math.prod)


def num_active_parameters(model: Model) -> int:
    """Elements of the parameters that one token passes: all but the experts that it is not sent to.

    Args:
        model: the model's section.

    Returns:
        The count; of a dense model, that of all parameters.
    """
    return _count(model, lambda shape: active_elements(model, shape))


def active_elements(model: Model, shape: Shape) -> int:
    """Elements of a parameter that one token passes: of stacked experts (E, out, in) only those it is sent to."""
    if model.moe is None or len(shape) < 3:
        return math.prod(shape)
    return model.moe.experts_per_token * math.prod(shape[1:])


def layers_by_shape(model: Model) -> list[tuple[int, dict[str, Shape]]]:
    """The kinds of blocks that a model has, without listing the layers one by one.

    Args:
        model: the model's section.

    Returns:
        (number of such blocks, their parameters), dense ones first.
    """
    num_dense = model.num_layers if model.moe is None else min(model.moe.num_dense_layers, model.num_layers)
    kinds = ((num_dense, 0), (model.num_layers - num_dense, num_dense))
    return [(count, block_shapes(model, first)) for count, first in kinds if count]


def _count(model: Model, size: Callable[[Shape], int]) -> int:
    embeddings = model.vocab_size * model.dim * (1 if model.tie_embeddings else 2)
    blocks = sum(count * sum(map(size, shapes.values())) for count, shapes in layers_by_shape(model))
    further = model.num_mtp_layers * sum(map(size, mtp_shapes(model).values()))
    return embeddings + blocks + model.dim + further
