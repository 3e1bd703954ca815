"""A dense decoder on operators whose bits do not depend on batch, position, chunks or threads.

The same modules with the same parameters; only what they call is another. A sequence's logits, and the gradients that
come back to its tokens, then have the same bits in any micro-batch; a weight's gradient is one chain of additions over
the micro-batch's tokens, so that neither threads nor `memory.loss_chunk_tokens` move it (bf16 on matrix units: chunks
that are multiples of 32).

N tokens, D model width, V vocabulary, C tokens of a chunk.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from drumline.models.decoder import Decoder, Output
from drumline.models.layers import Embedding, FeedForward, Linear
from drumline.models.loss import IGNORED, CrossEntropy
from drumline.models.norm import RMSNorm
from drumline.models.rope import Rope
from drumline.numerics import invariant

TABLES = ("aten::pow",)
"""Operators of class unknown that make the rotary tables: of positions alone, whatever the batch."""


class InvariantAttend:
    """Attention tiled at absolute positions; documents by their starts."""

    def __call__(
        self, q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor, rope: Rope, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """As `Attend`; the mask is starts_BT itself."""
        return invariant.attention(q_BTHK, k_BTGK, v_BTGK, rope.cos_TK2, rope.sin_TK2, mask)


def make_invariant(model: Decoder) -> Decoder:
    """Lets a decoder's modules call invariant operators.

    Args:
        model: dense, built with `InvariantAttend` and `invariant_cross_entropy`; changed in place.

    Returns:
        The model.
    """
    for module in model.modules():
        if type(module) in _FORMS:
            module.__class__ = _FORMS[type(module)]
    return model


class _Linear(Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return invariant.linear(input, self.weight)


class _Embedding(Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return invariant.embedding(input, self.weight, self.compute_dtype)


class _RMSNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return invariant.rms_norm(x, self.weight, self.eps)


class _FeedForward(FeedForward):
    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        gate, up = self.project(x_BTD, (self.gate_proj, self.up_proj))
        return self.down_proj(invariant.swiglu(gate, up))


class _Output(Output):
    def forward(
        self, x_BTD: torch.Tensor, labels_BT: torch.Tensor | None, shared_weight_VD: torch.Tensor | None
    ) -> torch.Tensor:
        weight_VD = self.weight if self.weight is not None else shared_weight_VD
        if labels_BT is None and weight_VD is not None:
            return invariant.linear(x_BTD, weight_VD)
        return super().forward(x_BTD, labels_BT, shared_weight_VD)


_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    Linear: _Linear,
    Embedding: _Embedding,
    RMSNorm: _RMSNorm,
    FeedForward: _FeedForward,
    Output: _Output,
}


def invariant_cross_entropy(chunk_tokens: int) -> CrossEntropy:
    """A cross-entropy that holds the logits of `chunk_tokens` tokens at a time.

    Args:
        chunk_tokens: C.

    Returns:
        The function; its labels are int64, and IGNORED counts for nothing.
    """

    def cross_entropy(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        return _Chunked.apply(hidden_ND, weight_VD, labels_N, chunk_tokens)

    return cross_entropy


class _Chunked(torch.autograd.Function):
    """A chunk's logits become the loss and, at once, the gradients; the losses of all tokens are summed last."""

    @staticmethod
    def forward(ctx: Any, hidden_ND, weight_VD, labels_N, chunk_tokens):
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        weight = weight_VD.to(hidden_ND.dtype)
        losses, grads, grad_weight = [], [], None
        for start in range(0, len(hidden_ND), chunk_tokens):
            hidden, labels = hidden_ND[start : start + chunk_tokens], labels_N[start : start + chunk_tokens]
            loss, grad = invariant.cross_entropy_with_gradient(invariant.linear(hidden, weight), labels, IGNORED)
            losses.append(loss)
            if needs_hidden:
                grads.append(invariant.matmul(grad, weight))
            if needs_weight:
                grad_weight = invariant.weight_gradient(grad, hidden, grad_weight)
        ctx.save_for_backward(torch.cat(grads) if grads else None, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return invariant.sum(torch.cat(losses))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_hidden, grad_weight = ctx.saved_tensors
        seed = grad_outputs[0]
        return (
            None if grad_hidden is None else (grad_hidden * seed).to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * seed).to(ctx.weight_dtype),
            None,
            None,
        )
