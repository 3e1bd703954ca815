"""Norms whose weight gradient is a sum over fixed chunks, of tokens that ranks share out.

B sequences, T tokens between matmuls, C chunks, R rows of a chunk, D model width, H heads, K head width, g groups of
heads of this rank.
"""

import torch
from torch.autograd.function import once_differentiable

from drumline.models.norm import RMSNorm
from drumline.numerics.exact import chunked, leaf_sum, rms_norm, rms_norm_gradients, unchunked
from drumline.parallel.exact.pieces import Pieces
from drumline.parallel.tensor.collectives import start_gather


class ExactNorm:
    """The forward of a norm of hidden states between matmuls.

    Args:
        norm: the norm.
        pieces: of this rank.
    """

    def __init__(self, norm: RMSNorm, pieces: Pieces):
        self._norm = norm
        self._pieces = pieces

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x_CRD = chunked(x, self._pieces.num_between)
        y_CRD: torch.Tensor = _Norm.apply(  # pyright: ignore[reportAssignmentType]
            x_CRD, self._norm.weight, self._norm.eps, self._pieces.leaves
        )
        return unchunked(y_CRD, len(x))


class ExactHeadNorm:
    """The forward of a norm of the heads of queries or keys, [B, T, H, K].

    Args:
        norm: the norm.
        pieces: of this rank.
    """

    def __init__(self, norm: RMSNorm, pieces: Pieces):
        self._norm = norm
        self._pieces = pieces

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        pieces = self._pieces
        x_CRHK = chunked(x, len(pieces.chunks))
        x_CgRHK = x_CRHK.unflatten(2, (pieces.own_groups, -1)).movedim(2, 1)
        flat: torch.Tensor = _Norm.apply(  # pyright: ignore[reportAssignmentType]
            x_CgRHK.flatten(2, 3).flatten(0, 1), self._norm.weight, self._norm.eps, self._leaves
        )
        y_CRHK = flat.view(x_CgRHK.shape).movedim(1, 2).flatten(2, 3)
        return unchunked(y_CRHK, len(x))

    def _leaves(self, leaves_gK: torch.Tensor) -> torch.Tensor:
        """The sum over groups of heads, then over chunks."""
        pieces = self._pieces
        leaves_CgK = leaves_gK.unflatten(0, (-1, pieces.own_groups))
        sums_CK = leaf_sum(leaves_CgK.movedim(1, 0).contiguous(), pieces.own_groups)
        if pieces.tensor is not None:
            sums_CK = leaf_sum(start_gather(sums_CK, pieces.tensor)(), pieces.tensor.degree)
        return pieces.all_leaves(sums_CK)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_CRD, weight_D, eps, sum_leaves):
        x_CRD = x_CRD.contiguous()
        y_CRD, r_CR1 = rms_norm(x_CRD, weight_D.to(x_CRD.dtype), eps)
        ctx.save_for_backward(x_CRD, weight_D, r_CR1)
        ctx.sum_leaves = sum_leaves
        return y_CRD

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        x_CRD, weight_D, r_CR1 = ctx.saved_tensors
        grad_CRD = grad_outputs[0].contiguous()
        grad_x_CRD, leaves = rms_norm_gradients(grad_CRD, x_CRD, weight_D.to(x_CRD.dtype), r_CR1)
        return grad_x_CRD, ctx.sum_leaves(leaves), None, None
