"""Products in fixed shapes: one call a chunk and block, whoever computes it.

    spread    y[c, b] = x[c] w[b]                     a column-parallel layer; the input gradient of a row-parallel one
    summed    y[c] = sum_b x[c, b] w[b]               the other two
    gradient  dw[b] = sum_c x[c, b]^T y[c, b]         of either's weight

Sums go up a binary tree, in fp32 at least; under bf16 each product is first rounded, since a CPU has no product of bf16
with an fp32 result.

C chunks, b blocks, R rows of a chunk, K and N widths of a block.
"""

from collections.abc import Callable, Sequence

import torch

from drumline.numerics.exact.leaves import LeafSum, leaf_sum
from drumline.numerics.exact.pieces import aligned, ends_on_lines, wide


def spread_product(x_CRK: torch.Tensor, weights_bKN: torch.Tensor) -> torch.Tensor:
    """Each chunk times each block.

    Args:
        x_CRK: chunks.
        weights_bKN: blocks; each may be transposed in memory.

    Returns:
        y_CbRN.
    """
    num_chunks, num_rows, _ = x_CRK.shape
    num_blocks, _, width = weights_bKN.shape
    y_CbRN = x_CRK.new_empty((num_chunks, num_blocks, num_rows, width))
    weights = [aligned(weight_KN) for weight_KN in weights_bKN]
    for x_RK, y_bRN in zip(map(aligned, x_CRK), y_CbRN, strict=True):
        for weight_KN, y_RN in zip(weights, y_bRN, strict=True):
            if ends_on_lines(y_RN):
                torch.mm(x_RK, weight_KN, out=y_RN)
            else:
                y_RN.copy_(torch.mm(x_RK, weight_KN))
    return y_CbRN


def summed_product(x_CbRK: torch.Tensor, weights_bKN: torch.Tensor) -> torch.Tensor:
    """The sum over blocks of each chunk's block times that block.

    Args:
        x_CbRK: blocks of chunks.
        weights_bKN: blocks; each may be transposed in memory.

    Returns:
        y_CRN in fp32 at least.
    """
    dtype = wide(x_CbRK.dtype)
    y_CRN = x_CbRK.new_empty((x_CbRK.shape[0], x_CbRK.shape[2], weights_bKN.shape[2]), dtype=dtype)
    weights = [aligned(weight_KN) for weight_KN in weights_bKN]
    for x_bRK, y_RN in zip(x_CbRK, y_CRN, strict=True):
        pairs = zip(map(aligned, x_bRK), weights, strict=True)
        products = (torch.mm(x_RK, weight_KN).to(dtype) for x_RK, weight_KN in pairs)
        y_RN.copy_(leaf_sum(products, len(weights)))
    return y_CRN


def summed_gradient(
    order: Sequence[int], num_blocks: int, pair: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """The gradient of a weight's blocks, a leaf a chunk.

    Args:
        order: of the chunks as leaves.
        num_blocks: b.
        pair: of a chunk and a block: left_RN and right_RK.

    Returns:
        The sum over chunks of left^T right, [b, N, K] in fp32 at least.
    """
    found = []
    for block in range(num_blocks):
        total = LeafSum(len(order))
        for chunk in order:
            left_RN, right_RK = map(aligned, pair(chunk, block))
            leaf = left_RN.t() @ right_RK
            total.add(leaf.to(wide(leaf.dtype)))
        found.append(total.total())
    return torch.stack(found)
