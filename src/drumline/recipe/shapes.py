"""The shapes of a model's parameters by logical name: what builds the model, what is counted, and what is costed.

Legend: D model width, H query heads, G key/value heads, K head width, F hidden width, V vocabulary.
"""

import math

from drumline.recipe.sections import Model

Shape = tuple[int, ...]


def block_shapes(model: Model) -> dict[str, Shape]:
    """Parameters of one block.

    Args:
        model: the model's section.

    Returns:
        Name within the block -> shape, in the order of the forward pass. A linear's weight is (out, in).
    """
    D, K, F = model.dim, model.head_dim, model.hidden_dim
    HK, GK = model.num_heads * K, model.num_kv_heads * K
    norms: dict[str, Shape] = (
        {"attention.q_norm.weight": (K,), "attention.k_norm.weight": (K,)} if model.qk_norm else {}
    )
    return {
        "attention_norm.weight": (D,),
        "attention.q_proj.weight": (HK, D),
        "attention.k_proj.weight": (GK, D),
        "attention.v_proj.weight": (GK, D),
        "attention.o_proj.weight": (D, HK),
        **norms,
        "mlp_norm.weight": (D,),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }


def parameter_shapes(model: Model) -> dict[str, Shape]:
    """Every parameter of a model.

    Args:
        model: the model's section.

    Returns:
        Logical name -> shape; a tied output has no name of its own.
    """
    block = block_shapes(model)
    shapes: dict[str, Shape] = {"embedding.weight": (model.vocab_size, model.dim)}
    for index in range(model.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in block.items()}
    shapes["norm.weight"] = (model.dim,)
    if not model.tie_embeddings:
        shapes["output.weight"] = (model.vocab_size, model.dim)
    return shapes


def num_parameters(model: Model) -> int:
    """Elements of all parameters, a tied one once.

    Args:
        model: the model's section.

    Returns:
        The count, without listing the layers one by one.
    """
    embeddings = model.vocab_size * model.dim * (1 if model.tie_embeddings else 2)
    block = sum(math.prod(shape) for shape in block_shapes(model).values())
    return embeddings + model.num_layers * block + model.dim
