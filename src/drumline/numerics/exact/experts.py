"""SwiGLU experts on runs of rows, each run of one expert and of one chunk of one sender's tokens.

How many rows a run has is a function of the data, so that its products have the same shapes whoever computes them. A
run is a leaf of the sum over chunks that gives its expert's gradient.

R rows of all runs, M rows of a run, E experts, b blocks of this rank, D model width, F hidden width of a block.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from drumline.numerics.exact.leaves import LeafSum, leaf_sum
from drumline.numerics.exact.pieces import wide
from drumline.numerics.exact.products import product
from drumline.numerics.exact.swiglu import swiglu_gradients, swiglu_value


class Run(NamedTuple):
    """Neighbouring rows.

    Attributes:
        sender: whose data they are; gradients of different senders are kept apart.
        chunk: of the sequence, its number.
        expert: that they are for.
        rows: which these are.
    """

    sender: int
    chunk: int
    expert: int
    rows: slice


class Weights(NamedTuple):
    """Weights of experts in blocks, in the dtype of the rows.

    Attributes:
        gate_up_EbFD: gate above up, 2 F rows of a block.
        down_EbDF: contiguous.
    """

    gate_up_EbFD: torch.Tensor
    down_EbDF: torch.Tensor


def runs_of(counts_SCE: Sequence[Sequence[Sequence[int]]], senders: Sequence[int], chunks: Sequence[Sequence[int]]):
    """The runs of rows that come source by source, for each source expert by expert, for each of these by chunk.

    Args:
        counts_SCE: rows of each source, chunk and expert.
        senders: of each source, whose data it has.
        chunks: of each source, the numbers of its chunks.

    Returns:
        The runs that have rows.
    """
    runs, start = [], 0
    for counts_CE, sender, numbers in zip(counts_SCE, senders, chunks, strict=True):
        for expert in range(len(counts_CE[0])):
            for counts_E, number in zip(counts_CE, numbers, strict=True):
                stop = start + counts_E[expert]
                if stop > start:
                    runs.append(Run(sender, number, expert, slice(start, stop)))
                start = stop
    return runs


def expert_rows(rows_RD: torch.Tensor, weights: Weights, runs: Sequence[Run]) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies each run's expert.

    Args:
        rows_RD: contiguous.
        weights: of the experts.
        runs: of the rows.

    Returns:
        y_RD, sums over own blocks, in fp32 at least; and gate and up of every block, [b, R, 2 F].
    """
    num_blocks, width = weights.gate_up_EbFD.shape[1:3]
    y_RD = torch.zeros_like(rows_RD, dtype=wide(rows_RD.dtype))
    gate_up_bRF = rows_RD.new_zeros((num_blocks, len(rows_RD), width))
    for run in runs:
        x_MD, leaves = rows_RD[run.rows], []
        for block in range(num_blocks):
            found_MF = product(x_MD, weights.gate_up_EbFD[run.expert, block]).to(x_MD.dtype)
            gate_up_bRF[block, run.rows] = found_MF
            hidden_MF = swiglu_value(*(half.contiguous() for half in found_MF.chunk(2, dim=1)))
            leaves.append(product(hidden_MF, weights.down_EbDF[run.expert, block]))
        y_RD[run.rows] = leaf_sum(leaves, len(leaves))
    return y_RD, gate_up_bRF


class ExpertGradients:
    """The gradients of weights, each sender's apart.

    Args:
        weights: like those of the experts, in any dtype.
        orders: of each sender, the numbers of the chunks that are leaves, in their order.
    """

    def __init__(self, weights: Weights, orders: Mapping[int, Sequence[int]]):
        self._weights = weights
        self._orders = orders
        self._leaves: dict[tuple[int, int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def put(self, run: Run, leaves: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Takes the gradients of gate and up, and of down, of every block."""
        self._leaves[run.sender, run.expert, run.chunk] = leaves

    def take(self) -> Iterator[tuple[int, Weights]]:
        """Of each sender the sums over its chunks, in fp32 at least; 0 where an expert had no rows."""
        for sender, order in self._orders.items():
            found = Weights(*(torch.zeros_like(each, dtype=wide(each.dtype)) for each in self._weights))
            num_experts, num_blocks = found.down_EbDF.shape[:2]
            for expert in range(num_experts):
                for block in range(num_blocks):
                    totals = LeafSum(len(order)), LeafSum(len(order))
                    for chunk in order:
                        leaves = self._leaves.get((sender, expert, chunk))
                        for total, leaf in zip(totals, leaves[block] if leaves else (None, None), strict=True):
                            total.add(leaf)
                    for into, total in zip(found, totals, strict=True):
                        if (value := total.total()) is not None:
                            into[expert, block] += value  # what is 0 is +0, as where ranks add nothing
            yield sender, found


def expert_rows_backward(
    grad_RD: torch.Tensor,
    rows_RD: torch.Tensor,
    gate_up_bRF: torch.Tensor,
    weights: Weights,
    runs: Sequence[Run],
    gradients: ExpertGradients,
) -> torch.Tensor:
    """Derivatives of `expert_rows`.

    Args:
        grad_RD: of y, contiguous, in the dtype of the rows.
        rows_RD: as in the forward.
        gate_up_bRF: that it gave.
        weights: as in the forward.
        runs: likewise.
        gradients: are given those of the weights.

    Returns:
        The gradient of the rows, sums over own blocks, [R, D] in fp32 at least.
    """
    dtype = wide(rows_RD.dtype)
    grad_rows_RD = torch.zeros_like(rows_RD, dtype=dtype)
    for run in runs:
        x_MD, grad_MD = rows_RD[run.rows], grad_RD[run.rows]
        leaves, found = [], []
        for block in range(len(gate_up_bRF)):
            gate_MF, up_MF = (half.contiguous() for half in gate_up_bRF[block, run.rows].chunk(2, dim=1))
            grad_hidden_MF = product(grad_MD, weights.down_EbDF[run.expert, block].t()).to(grad_MD.dtype)
            grad_MF = torch.cat(swiglu_gradients(grad_hidden_MF, gate_MF, up_MF), dim=1)
            leaves.append(product(grad_MF, weights.gate_up_EbFD[run.expert, block].t()))
            grad_down_DF = product(grad_MD.t(), swiglu_value(gate_MF, up_MF).t())
            found.append((product(grad_MF.t(), x_MD.t()), grad_down_DF))
        grad_rows_RD[run.rows] = leaf_sum(leaves, len(leaves))
        gradients.put(run, found)
    return grad_rows_RD
