"""Column- and row-parallel layers as sums over fixed blocks and chunks.

    project    y[c, b] = x[c] W[b]^T         W[b]: the b-th block of the rows. Input gradients of all weights that have
                                             this input are added inside a block, and sent once
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
    column_gradient,
    row_gradients,
    spread_product,
    summed_product,
    unchunked,
)
from drumline.parallel.exact.pieces import Pieces


def project_blocks(x_BTD: torch.Tensor, layers: Sequence[Linear], pieces: Pieces) -> Sequence[torch.Tensor]:
    """Column-parallel layers of one input, in chunks.

    Args:
        x_BTD: between matmuls.
        layers: weights are this rank's rows, whole blocks.
        pieces: of this rank.

    Returns:
        y_CRN of each layer.
    """
    return _Project.apply(x_BTD, pieces, *(layer.weight for layer in layers))  # pyright: ignore[reportReturnType]


def merge_blocks(y_CRN: torch.Tensor, layer: Linear, num_sequences: int, pieces: Pieces) -> torch.Tensor:
    """A row-parallel layer of what is in chunks.

    Args:
        y_CRN: of this rank's columns.
        layer: its weight is this rank's columns, whole blocks.
        num_sequences: B.
        pieces: of this rank.

    Returns:
        x_BTD between matmuls, in y's dtype.
    """
    return _Merge.apply(y_CRN, layer.weight, num_sequences, pieces)  # pyright: ignore[reportReturnType]


class Projected:
    """What stands in the place of a module's `project`.

    Args:
        pieces: of this rank.
    """

    def __init__(self, pieces: Pieces):
        self._pieces = pieces

    def __call__(self, x_BTD: torch.Tensor, layers: Sequence[Linear]) -> Sequence[torch.Tensor]:
        found = project_blocks(x_BTD, layers, self._pieces)
        return [unchunked(y_CRN, len(x_BTD)) for y_CRN in found]


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
        return merge_blocks(y_CRN, self._layer, len(input), self._pieces)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTD, pieces, *weights):
        ctx.pieces = pieces
        ctx.save_for_backward(x_BTD, *weights)
        x_CRD = pieces.enter(chunked(x_BTD, pieces.num_between).contiguous())
        return tuple(spread_product(x_CRD, weight.to(x_CRD.dtype), pieces.own_blocks) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        pieces, (x_BTD, *weights) = ctx.pieces, ctx.saved_tensors
        grads_CRN = [grad_CRN.contiguous() for grad_CRN in grad_outputs]
        rounded = [weight.to(x_BTD.dtype) for weight in weights]
        grad_x_CRD = pieces.leave(summed_product(grads_CRN, rounded, pieces.own_blocks)).to(x_BTD.dtype)
        x_CRD = pieces.enter(chunked(x_BTD, pieces.num_between).contiguous())
        own = row_gradients(grads_CRN, x_CRD, pieces.order, pieces.own_blocks)
        return unchunked(grad_x_CRD, len(x_BTD)), None, *map(pieces.over_chunks, own)


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_CRN, weight, num_sequences, pieces):
        ctx.pieces = pieces
        y_CRN = y_CRN.contiguous()
        ctx.save_for_backward(y_CRN, weight)
        partial = summed_product([y_CRN], [weight.to(y_CRN.dtype).t()], pieces.own_blocks)
        return unchunked(pieces.leave(partial).to(y_CRN.dtype), num_sequences)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        pieces, (y_CRN, weight) = ctx.pieces, ctx.saved_tensors
        grad_CRD = pieces.enter(chunked(grad_outputs[0], pieces.num_between).contiguous())
        grad_y_CRN = spread_product(grad_CRD, weight.to(y_CRN.dtype).t(), pieces.own_blocks)
        own = column_gradient(grad_CRD, y_CRN, pieces.order, pieces.own_blocks)
        return grad_y_CRN, pieces.over_chunks(own), None, None
