"""Column- and row-parallel layers as sums over fixed blocks and chunks.

    project    y[c, b] = x[c] W[b]^T         W[b]: the b-th block of the rows of all weights that have this input, so
                                             that their input gradients are added in one product, and sent once
    merge      x[c] = sum_b y[c, b] W[b]^T   W[b]: the b-th block of the columns

Weights are fp32 masters, cast where they are multiplied; their gradients are never rounded to less.
Under sequence parallelism what is kept for the backward is the share of the tokens, as in `drumline.parallel.tensor`.
Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.

B sequences, T tokens between matmuls, C chunks, b blocks of this rank, R rows of a chunk, D model width, N a width.
"""

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from drumline.models.layers import Linear
from drumline.numerics.exact import (
    chunked,
    column_blocks,
    cut_rows,
    in_blocks,
    joined_blocks,
    row_blocks,
    spread_product,
    summed_gradient,
    summed_product,
    unchunked,
)
from drumline.parallel.exact.pieces import Pieces


def project_blocks(x_BTD: torch.Tensor, layers: Sequence[Linear], pieces: Pieces) -> Sequence[torch.Tensor]:
    """Column-parallel layers of one input, in blocks.

    Args:
        x_BTD: between matmuls.
        layers: weights are this rank's rows, whole blocks.
        pieces: of this rank.

    Returns:
        y_CbRN of each layer; views of one tensor.
    """
    weights = [layer.weight for layer in layers]
    y_CbRN: torch.Tensor = _Project.apply(x_BTD, pieces, *weights)  # pyright: ignore[reportAssignmentType]
    return y_CbRN.split([len(weight) // pieces.own_blocks for weight in weights], dim=-1)


def merge_blocks(y_CbRN: torch.Tensor, layer: Linear, num_sequences: int, pieces: Pieces) -> torch.Tensor:
    """A row-parallel layer of what is in blocks.

    Args:
        y_CbRN: of this rank's columns.
        layer: its weight is this rank's columns, whole blocks.
        num_sequences: B.
        pieces: of this rank.

    Returns:
        x_BTD between matmuls, in y's dtype.
    """
    return _Merge.apply(y_CbRN, layer.weight, num_sequences, pieces)  # pyright: ignore[reportReturnType]


class Projected:
    """What stands in the place of a module's `project`.

    Args:
        pieces: of this rank.
    """

    def __init__(self, pieces: Pieces):
        self._pieces = pieces

    def __call__(self, x_BTD: torch.Tensor, layers: Sequence[Linear]) -> Sequence[torch.Tensor]:
        found = project_blocks(x_BTD, layers, self._pieces)
        return [unchunked(joined_blocks(y_CbRN), len(x_BTD)) for y_CbRN in found]


class Merged:
    """The forward of a row-parallel layer.

    Args:
        layer: the layer.
        pieces: of this rank.
    """

    def __init__(self, layer: Linear, pieces: Pieces):
        self._layer = layer
        self._pieces = pieces

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        y_CRN = chunked(input, len(self._pieces.chunks))
        blocks = in_blocks(y_CRN, self._pieces.own_blocks)
        return merge_blocks(blocks, self._layer, len(input), self._pieces)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTD, pieces, *weights):
        ctx.pieces = pieces
        ctx.save_for_backward(x_BTD, *weights)
        x_CRD = pieces.enter(chunked(x_BTD, pieces.num_between).contiguous())
        return spread_product(x_CRD, _rows(weights, x_CRD.dtype, pieces).mT)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        pieces, (x_BTD, *weights) = ctx.pieces, ctx.saved_tensors
        grad_CbRN = grad_outputs[0].contiguous()
        partial = summed_product(grad_CbRN, _rows(weights, grad_CbRN.dtype, pieces))
        grad_x_CRD = pieces.leave(partial).to(x_BTD.dtype)
        x_CRD = pieces.enter(chunked(x_BTD, pieces.num_between).contiguous())
        own = summed_gradient(pieces.order, pieces.own_blocks, lambda c, b: (grad_CbRN[c, b], x_CRD[c]))
        grads = cut_rows(pieces.over_chunks(own), [len(weight) for weight in weights])
        return unchunked(grad_x_CRD, len(x_BTD)), None, *grads


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_CbRN, weight, num_sequences, pieces):
        ctx.pieces = pieces
        y_CbRN = y_CbRN.contiguous()
        ctx.save_for_backward(y_CbRN, weight)
        partial = summed_product(y_CbRN, _columns(weight, y_CbRN.dtype, pieces).mT)
        return unchunked(pieces.leave(partial).to(y_CbRN.dtype), num_sequences)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        pieces, (y_CbRN, weight) = ctx.pieces, ctx.saved_tensors
        grad_CRD = pieces.enter(chunked(grad_outputs[0], pieces.num_between).contiguous())
        grad_y = spread_product(grad_CRD, _columns(weight, grad_CRD.dtype, pieces))
        own = summed_gradient(pieces.order, pieces.own_blocks, lambda c, b: (grad_CRD[c], y_CbRN[c, b]))
        grad_weight_bDN = pieces.over_chunks(own)
        return grad_y, grad_weight_bDN.movedim(0, 1).flatten(1), None, None


def _rows(weights: Sequence[torch.Tensor], dtype: torch.dtype, pieces: Pieces) -> torch.Tensor:
    return row_blocks([weight.to(dtype) for weight in weights], pieces.own_blocks)


def _columns(weight: torch.Tensor, dtype: torch.dtype, pieces: Pieces) -> torch.Tensor:
    return column_blocks(weight.to(dtype), pieces.own_blocks)
