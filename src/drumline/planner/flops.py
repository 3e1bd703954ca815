"""FLOPs of training on one token: the forward pass and the backward pass, which costs twice the forward.

    linear     6 N           N: weights that multiply (all matrices and the output projection; no lookup, no norm; of
                             experts, those that a token is sent to)
    attention  6 L H K (T+1) two products of 2 K per query, head and key, over the (T+1)/2 keys a causal query sees, x 3

Under latent attention a product with values is as wide as a value head, not K. A module of multi-token prediction is
one more layer, its merging matrix and one more pass of the output projection.
A multiply-add is two FLOPs. Recomputation under activation checkpointing is not counted: this is the work of the model,
the numerator of model FLOPs utilization (MFU). Without the causal half, attention is PaLM's 12 L H Q T.
Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B; Kaplan et al. 2020, arXiv:2001.08361, section 2.1.

Legend: T tokens of a sequence, L layers, H query heads, K head width, V vocabulary, D model width.
"""

from dataclasses import dataclass

from drumline.recipe.sections import Model
from drumline.recipe.shapes import active_elements, layers_by_shape, mtp_shapes

_FORWARD_AND_BACKWARD = 3  # the backward multiplies twice: for the gradients of the inputs and of the weights


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token's forward and backward pass.

    Attributes:
        linear: in matrix multiplications with weights.
        attention: in query x key and probability x value.
    """

    linear: int
    attention: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.linear + self.attention


def flops_per_token(model: Model, seq_len: int, *, is_causal: bool = True) -> Flops:
    """FLOPs of training on one token.

    Args:
        model: the model's section.
        seq_len: tokens T of a sequence; a token attends within it.
        is_causal: count only the keys that a causal query sees. Document masks see fewer and are not counted.

    Returns:
        FLOPs of the forward and the backward pass, averaged over a sequence's tokens.
    """
    matrices = sum(
        count * active_elements(model, shape)
        for count, shapes in layers_by_shape(model)
        for shape in shapes.values()
        if len(shape) >= 2
    )
    further = sum(active_elements(model, shape) for shape in mtp_shapes(model).values() if len(shape) >= 2)
    outputs = (1 + model.num_mtp_layers) * model.vocab_size * model.dim
    weights = matrices + model.num_mtp_layers * further + outputs
    keys_twice = seq_len + 1 if is_causal else 2 * seq_len  # twice the mean number of keys, which may be a half
    widths = model.head_dim + (model.head_dim if model.mla is None else model.mla.v_head_dim)
    attention = keys_twice * (model.num_layers + model.num_mtp_layers) * model.num_heads * widths
    return Flops(_FORWARD_AND_BACKWARD * 2 * weights, _FORWARD_AND_BACKWARD * attention)
