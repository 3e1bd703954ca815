"""Products whose bits do not depend on who computes which chunks and blocks.

    spread    y = x w^T                               a column-parallel layer; the input gradient of a row-parallel one
    summed    y = sum_b sum_i x_i[b] w_i[b]           the other two; i: layers of one input
    gradient  dw = sum_c x[c]^T y[c]                  of either's weight

Sums over blocks and chunks go up a binary tree, in fp32 at least. In drumline's kernel an element of a product is one
chain of multiply-adds, whatever is computed beside it, so that chunks and blocks are cut only where they are summed.
Elsewhere every product is of one chunk and one block, in a call of that shape; under bf16 it is first rounded, since
torch has no product of bf16 with an fp32 result on CPUs.

C chunks, b blocks, R rows of a chunk, K, N and O widths; of what is in blocks, all own ones.
"""

from collections.abc import Sequence

import torch

from drumline.numerics.exact.leaves import LeafSum, leaf_sum
from drumline.numerics.exact.pieces import (
    aligned,
    cut_rows,
    ends_on_lines,
    in_blocks,
    joined_blocks,
    row_blocks,
    wide,
)
from drumline.numerics.invariant.native import library
from drumline.numerics.kernels import matmul
from drumline.numerics.kernels.leaves import matmul_leaves


def spread_product(x_CRK: torch.Tensor, weight_NK: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Each chunk times each block.

    Args:
        x_CRK: contiguous.
        weight_NK: of x's dtype; may be transposed in memory.
        num_blocks: of N.

    Returns:
        y_CRN.
    """
    built = library(matmul, x_CRK, weight_NK)
    if built is not None:
        return matmul.matmul(built, x_CRK.flatten(0, 1), weight_NK, x_CRK.dtype).unflatten(0, x_CRK.shape[:2])
    weights = _blocks(weight_NK.unflatten(0, (num_blocks, -1)))
    y_CbRn = x_CRK.new_empty((len(x_CRK), num_blocks, x_CRK.shape[1], len(weights[0])))
    for x_RK, y_bRn in zip(map(aligned, x_CRK), y_CbRn, strict=True):
        for weight_nK, y_Rn in zip(weights, y_bRn, strict=True):
            if ends_on_lines(y_Rn):
                torch.mm(x_RK, weight_nK.t(), out=y_Rn)
            else:
                y_Rn.copy_(torch.mm(x_RK, weight_nK.t()))
    return joined_blocks(y_CbRn)


def summed_product(
    inputs_CRN: Sequence[torch.Tensor], weights_NO: Sequence[torch.Tensor], num_blocks: int
) -> torch.Tensor:
    """The sum over blocks of each chunk's block times that block.

    Args:
        inputs_CRN: contiguous, of several widths.
        weights_NO: of each; may be transposed in memory.
        num_blocks: of each width.

    Returns:
        y_CRO in fp32 at least.
    """
    first_CRN, dtype = inputs_CRN[0], wide(inputs_CRN[0].dtype)
    built = library(matmul, *inputs_CRN, *weights_NO)
    if built is not None:
        inputs = [x_CRN.flatten(0, 1).tensor_split(num_blocks, dim=1) for x_CRN in inputs_CRN]
        weights = [weight_NO.tensor_split(num_blocks) for weight_NO in weights_NO]
        leaves = [
            [(x[block], weight[block].t()) for x, weight in zip(inputs, weights, strict=True)]
            for block in range(num_blocks)
        ]
        return matmul_leaves(built, leaves, dtype).unflatten(0, first_CRN.shape[:2])
    x_CbRn = torch.cat([in_blocks(x_CRN, num_blocks) for x_CRN in inputs_CRN], dim=-1)
    weights = _blocks(row_blocks(weights_NO, num_blocks))
    y_CRO = first_CRN.new_empty((*first_CRN.shape[:2], weights_NO[0].shape[1]), dtype=dtype)
    for x_bRn, y_RO in zip(x_CbRn, y_CRO, strict=True):
        pairs = zip(map(aligned, x_bRn), weights, strict=True)
        y_RO.copy_(leaf_sum((torch.mm(x_Rn, weight_nO).to(dtype) for x_Rn, weight_nO in pairs), len(weights)))
    return y_CRO


def row_gradients(
    grads_CRN: Sequence[torch.Tensor], x_CRK: torch.Tensor, order: Sequence[int], num_blocks: int
) -> list[torch.Tensor]:
    """The gradients of weights whose rows are in blocks, a leaf a chunk.

    Args:
        grads_CRN: of the results of each weight, contiguous.
        x_CRK: their input, contiguous.
        order: of the chunks as leaves.
        num_blocks: of each N.

    Returns:
        For each weight the sum over chunks of grad^T x, [N, K] in fp32 at least.
    """
    built = library(matmul, *grads_CRN, x_CRK)
    if built is not None:
        dtype = wide(x_CRK.dtype)
        return [
            matmul_leaves(built, [[(grad_CRN[chunk].t(), x_CRK[chunk].t())] for chunk in order], dtype)
            for grad_CRN in grads_CRN
        ]
    grad_CbRn = torch.cat([in_blocks(grad_CRN, num_blocks) for grad_CRN in grads_CRN], dim=-1)
    found = [_over_chunks(order, grad_CRn, x_CRK) for grad_CRn in grad_CbRn.unbind(1)]
    return cut_rows(torch.stack(found), [grad_CRN.shape[-1] for grad_CRN in grads_CRN])


def column_gradient(grad_CRO: torch.Tensor, x_CRN: torch.Tensor, order: Sequence[int], num_blocks: int) -> torch.Tensor:
    """The gradient of a weight whose columns are in blocks, a leaf a chunk.

    Args:
        grad_CRO: of its result, contiguous.
        x_CRN: its input, contiguous.
        order: of the chunks as leaves.
        num_blocks: of N.

    Returns:
        The sum over chunks of grad^T x, [O, N] in fp32 at least.
    """
    built = library(matmul, grad_CRO, x_CRN)
    if built is not None:
        leaves = [[(grad_CRO[chunk].t(), x_CRN[chunk].t())] for chunk in order]
        return matmul_leaves(built, leaves, wide(x_CRN.dtype))
    found = [_over_chunks(order, grad_CRO, x_CRn) for x_CRn in in_blocks(x_CRN, num_blocks).unbind(1)]
    return torch.cat(found, dim=1)


def product(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """One product of one chunk and block, a b^T, in fp32 at least.

    Args:
        a_MK: any strides.
        b_NK: of its dtype; may be transposed in memory.

    Returns:
        [M, N].
    """
    dtype, built = wide(a_MK.dtype), library(matmul, a_MK, b_NK)
    if built is not None:
        return matmul.matmul(built, a_MK, b_NK, dtype)
    return torch.mm(aligned(a_MK), aligned(b_NK).t()).to(dtype)


def _blocks(weights_bNK: torch.Tensor) -> list[torch.Tensor]:
    # Which bits torch gives may depend on how a block lies in memory, too.
    return [aligned(weight_NK.contiguous()) for weight_NK in weights_bNK]


def _over_chunks(order: Sequence[int], left_CRN: torch.Tensor, right_CRK: torch.Tensor) -> torch.Tensor:
    total = LeafSum(len(order))
    for chunk in order:
        leaf = aligned(left_CRN[chunk]).t() @ aligned(right_CRK[chunk])
        total.add(leaf.to(wide(leaf.dtype)))
    found = total.total()
    assert found is not None
    return found
