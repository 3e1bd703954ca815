"""Cross-entropy of the output projection, a chunk of tokens at a time: logits of all tokens never exist.

    loss = sum_n (log sum_v exp(h_n . w_v) - h_n . w_label(n))        dlogits = softmax - onehot

A chunk's logits are turned into the loss and, at once, into the gradients of hidden states and weight, so that one
matmul is not computed twice. What is kept is of the size of the hidden states and the weight, whatever T times V is.
Source of the idea: Hsu et al. 2024, arXiv:2410.10989 (Liger), "FusedLinearCrossEntropy".

N tokens, D model width, V vocabulary, C tokens of a chunk.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from drumline.numerics import kernels

IGNORED = -100

CrossEntropy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden_ND, weight_VD, labels_N) -> the sum of losses over labels that are not IGNORED, a scalar of fp32 at least."""

OfLogits = Callable[[torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]
"""(logits_CV, which may be overwritten, labels_C, wants a gradient) -> the summed loss of a chunk, and in the logits'
dtype the gradient of each row as if its label counted."""


def chunked_cross_entropy(chunk_tokens: int, of_logits: OfLogits | None = None) -> CrossEntropy:
    """A cross-entropy that holds the logits of `chunk_tokens` tokens at a time.

    Args:
        chunk_tokens: C.
        of_logits: what makes the loss of a chunk's logits; None: what does so where they are of the whole vocabulary.

    Returns:
        The function; its labels are int64, and IGNORED counts for nothing.
    """

    of_chunk = _of_logits if of_logits is None else of_logits

    def cross_entropy(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad):
            how = chunk_tokens, of_chunk
            return _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, labels_N, how)
        return _run(hidden_ND, weight_VD, labels_N, chunk_tokens, of_chunk, None, None)

    return cross_entropy


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, how):
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N)
        ctx.how = how
        loss, ctx.gradients = _loss_and_gradients(hidden_ND, weight_VD, labels_N, how, ctx.needs_input_grad)
        return loss

    @staticmethod
    @once_differentiable  # what is returned was computed in the forward: it has no derivative to give
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_loss,) = grad_outputs
        hidden_ND, weight_VD, labels_N = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # a second backward through the same graph: the first has taken the buffers
            _, gradients = _loss_and_gradients(hidden_ND, weight_VD, labels_N, ctx.how, ctx.needs_input_grad)
        return *(None if gradient is None else gradient.mul_(grad_loss) for gradient in gradients), None, None


def _loss_and_gradients(hidden_ND, weight_VD, labels_N, how, needs):
    grad_hidden_ND = torch.empty_like(hidden_ND) if needs[0] else None
    # Chunks are summed in fp32 at least, also where sharding has gathered the weight in bf16.
    dtype = torch.promote_types(weight_VD.dtype, torch.float32)
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if needs[1] else None
    chunk_tokens, of_logits = how
    loss = _run(hidden_ND, weight_VD, labels_N, chunk_tokens, of_logits, grad_hidden_ND, grad_weight_VD)
    return loss, (grad_hidden_ND, grad_weight_VD if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype))


def _run(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    chunk_tokens: int,
    of_logits: OfLogits,
    grad_hidden_ND: torch.Tensor | None,
    grad_weight_VD: torch.Tensor | None,
) -> torch.Tensor:
    """The loss; fills the gradients that are given."""
    dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    weight = weight_VD.detach().to(hidden_ND.dtype)
    loss = torch.zeros((), dtype=dtype, device=hidden_ND.device)
    wants_gradient = grad_hidden_ND is not None or grad_weight_VD is not None
    for start in range(0, hidden_ND.shape[0], chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        hidden_CD, labels_C = hidden_ND[chunk].detach(), labels_N[chunk]
        is_counted_C1 = (labels_C != IGNORED)[:, None]
        chunk_loss, grad_CV = of_logits(F.linear(hidden_CD, weight), labels_C, wants_gradient)
        loss += chunk_loss
        # Tokens that do not count are taken out where rows are D wide, not V.
        if grad_hidden_ND is not None:
            torch.mm(grad_CV, weight, out=grad_hidden_ND[chunk]).mul_(is_counted_C1)
        if grad_weight_VD is not None:
            grad_weight_VD += grad_CV.t() @ (hidden_CD * is_counted_C1)
    return loss


def _of_logits(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, wants_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a chunk, and in the logits' dtype the gradient of each row as if its label counted."""
    if kernels.take(logits_CV):
        return kernels.cross_entropy_(logits_CV, labels_C, IGNORED, wants_gradient).sum(), logits_CV
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    log_probability_CV = F.log_softmax(wide_CV, dim=-1)
    labels_C1 = labels_C.clamp(min=0)[:, None]
    loss = -(log_probability_CV.gather(1, labels_C1) * (labels_C != IGNORED)[:, None]).sum()
    if not wants_gradient:
        return loss, log_probability_CV
    grad_CV = log_probability_CV.exp_()
    grad_CV.scatter_add_(1, labels_C1, grad_CV.new_full(labels_C1.shape, -1.0))
    return loss, grad_CV.to(logits_CV.dtype)
