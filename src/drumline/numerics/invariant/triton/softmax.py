"""Softmax and log-softmax of rows, and their gradients; a row is summed by lanes and their tree."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumline.numerics.invariant.triton.launch import lanes, launch, num_tiles
from drumline.numerics.invariant.triton.tiles import load_rows, store_rows, tree_sum

_ROWS = 4


def softmax(x: Tensor, is_log: bool) -> Tensor:
    """Softmax or log-softmax over the last dim, in x's dtype."""
    x = x.contiguous()
    y = torch.empty_like(x)
    R, D = x.shape[:-1].numel(), x.shape[-1]
    launch(_softmax, num_tiles(R, _ROWS), x, y, R, D, IS_LOG=is_log, ROWS=_ROWS, LANES=lanes(D))
    return y


def softmax_backward(grad: Tensor, y: Tensor, is_log: bool) -> Tensor:
    """The gradient of the input, from that of the result y and y itself."""
    grad, y = grad.contiguous(), y.contiguous()
    grad_x = torch.empty_like(y)
    R, D = y.shape[:-1].numel(), y.shape[-1]
    tile = {"ROWS": _ROWS, "LANES": lanes(D)}
    launch(_softmax_backward, num_tiles(R, _ROWS), grad, y, grad_x, R, D, IS_LOG=is_log, **tile)
    return grad_x


@triton.jit
def top_and_total(x, row, R, D, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Of each row: its largest element, and the sum of exponentials of what the others are below it."""
    lane = tl.arange(0, LANES)
    tops = tl.full((ROWS, LANES), float("-inf"), tl.float32)
    for first in range(0, D, LANES):
        tops = tl.maximum(tops, load_rows(x, row, R, first + lane, D, float("-inf")))
    # Rows beyond the last have no element; zero keeps them from inf - inf.
    top = tl.where(row < R, tl.max(tops, 1), 0.0)
    totals = tl.zeros((ROWS, LANES), tl.float32)
    for first in range(0, D, LANES):
        totals += tl.exp(load_rows(x, row, R, first + lane, D, float("-inf")) - top[:, None])
    return top, tree_sum(totals, ROWS, LANES)


@triton.jit(do_not_specialize=["R"])
def _softmax(x, y, R, D, IS_LOG: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top, total = top_and_total(x, row, R, D, ROWS, LANES)
    total = tl.where(row < R, total, 1.0)
    for first in range(0, D, LANES):
        column = first + tl.arange(0, LANES)
        shifted = load_rows(x, row, R, column, D, 0.0) - top[:, None]
        if IS_LOG:
            value = shifted - tl.log(total)[:, None]
        else:
            value = tl.div_rn(tl.exp(shifted), tl.broadcast_to(total[:, None], (ROWS, LANES)))
        store_rows(y, row, R, column, D, value)


@triton.jit(do_not_specialize=["R"])
def _softmax_backward(grad, y, grad_x, R, D, IS_LOG: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    totals = tl.zeros((ROWS, LANES), tl.float32)
    for first in range(0, D, LANES):
        grad_tile = load_rows(grad, row, R, first + lane, D, 0.0)
        if IS_LOG:
            totals += grad_tile
        else:
            totals += grad_tile * load_rows(y, row, R, first + lane, D, 0.0)
    total = tree_sum(totals, ROWS, LANES)[:, None]
    for first in range(0, D, LANES):
        column = first + lane
        grad_tile = load_rows(grad, row, R, column, D, 0.0)
        y_tile = load_rows(y, row, R, column, D, 0.0)
        if IS_LOG:  # noqa: SIM108, a kernel is compiled for one of them
            value = grad_tile - tl.exp(y_tile) * total
        else:
            value = y_tile * (grad_tile - total)
        store_rows(grad_x, row, R, column, D, value)
