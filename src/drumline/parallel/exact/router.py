"""The router, and the gate of shared experts: small layers that every rank has whole, a chunk at a time.

    logits[c] = x[c] W^T,   dW = sum_c dlogits[c]^T x[c], a leaf a chunk of the tokens between matmuls

B sequences, T tokens, C chunks, R rows of a chunk, D model width, E experts, K experts of a token.
"""

import torch
from torch.autograd.function import once_differentiable

from drumline.models.moe import Routing, choose
from drumline.models.moe.router import Router
from drumline.numerics.exact import aligned, unchunked, wide
from drumline.numerics.exact.swiglu import Sigmoid
from drumline.parallel.exact.pieces import Pieces

_SMALLEST_SUM = 1e-20  # as in the router itself


def whole_linear(x_CRD: torch.Tensor, weight_ED: torch.Tensor, dtype: torch.dtype, pieces: Pieces) -> torch.Tensor:
    """A layer that is not shared out, of the chunks between matmuls.

    Args:
        x_CRD: contiguous.
        weight_ED: rounded to x's dtype first, as where sharding gathers it so.
        dtype: that it computes in.
        pieces: of this rank.

    Returns:
        y_CRE in `dtype`.
    """
    return _WholeLinear.apply(x_CRD, weight_ED, dtype, pieces)  # pyright: ignore[reportReturnType]


class ExactRouter:
    """The forward of a router, of contiguous chunks between matmuls: answers in the order of the sequences' tokens.

    Args:
        router: of the layer.
        pieces: of this rank.
    """

    def __init__(self, router: Router, pieces: Pieces):
        self._router = router
        self._pieces = pieces

    def __call__(self, x_CRD: torch.Tensor, num_sequences: int) -> Routing:
        logits_CRE = whole_linear(x_CRD, self._router.weight, wide(x_CRD.dtype), self._pieces)
        of_chunks = [self._route(logits_RE) for logits_RE in logits_CRE]
        fields = (torch.stack(field_C) for field_C in zip(*of_chunks, strict=True))
        return Routing(*(unchunked(field_CR, num_sequences).flatten(0, 1) for field_CR in fields))

    def _route(self, logits_RE: torch.Tensor) -> Routing:
        moe = self._router.moe
        if moe.scoring == "softmax":
            scores_RE = probability_RE = logits_RE.softmax(-1)
        else:
            scores_RE: torch.Tensor = Sigmoid.apply(logits_RE)  # pyright: ignore[reportAssignmentType]
            probability_RE = scores_RE / (scores_RE.sum(-1, keepdim=True) + _SMALLEST_SUM)
        return Routing(*choose(scores_RE, moe, self._router.bias), probability_RE, logits_RE)


class _WholeLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_CRD, weight_ED, dtype, pieces):
        ctx.save_for_backward(x_CRD, weight_ED)
        ctx.dtype, ctx.pieces = dtype, pieces
        rounded_ED = weight_ED.to(x_CRD.dtype).to(dtype)
        return torch.stack([torch.mm(aligned(x_RD.to(dtype)), rounded_ED.t()) for x_RD in x_CRD])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        x_CRD, weight_ED = ctx.saved_tensors
        rounded_ED = weight_ED.to(x_CRD.dtype).to(ctx.dtype)
        grads, leaves = [], []
        for grad_RE, x_RD in zip(grad_outputs[0].contiguous(), x_CRD, strict=True):
            grad_RE = aligned(grad_RE)
            grads.append(torch.mm(grad_RE, rounded_ED).to(x_CRD.dtype))
            leaf_ED = torch.mm(grad_RE.t(), aligned(x_RD.to(ctx.dtype)))
            leaves.append(leaf_ED.to(wide(leaf_ED.dtype)))
        return torch.stack(grads), ctx.pieces.leaves(torch.stack(leaves)), None, None
