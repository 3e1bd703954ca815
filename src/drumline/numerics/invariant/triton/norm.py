"""RMSNorm and its gradients. A row is summed by lanes and their tree, the weight's gradient by blocks of 64 rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumline.numerics.invariant.triton.launch import lanes, launch, num_tiles
from drumline.numerics.invariant.triton.sums import sum_columns
from drumline.numerics.invariant.triton.tiles import load_rows, store_rows, tree_sum

_ROWS, _BLOCK, _COLUMNS = 4, 64, 256


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of rows [..., D] in x's dtype, and the factor of each in fp32; the weight is rounded to x's dtype."""
    x, weight = x.contiguous(), weight_D.to(x.dtype).contiguous()
    R, D = x.shape[:-1].numel(), x.shape[-1]
    y, scale = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    tile = {"ROWS": _ROWS, "LANES": lanes(D)}
    launch(_norm, num_tiles(R, _ROWS), x, weight, y, scale, R, D, eps, **tile)
    return y, scale


def rms_norm_backward(grad: Tensor, x: Tensor, weight_D: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight, each in its dtype."""
    grad, x, scale = grad.contiguous(), x.contiguous(), scale.contiguous()
    weight = weight_D.to(x.dtype).contiguous()
    R, D = x.shape[:-1].numel(), x.shape[-1]
    grad_x = torch.empty_like(x)
    tile = {"ROWS": _ROWS, "LANES": lanes(D)}
    launch(_norm_backward, num_tiles(R, _ROWS), grad, x, weight, scale, grad_x, R, D, **tile)
    num_blocks = num_tiles(R, _BLOCK)
    partials = x.new_empty((num_blocks, D), dtype=torch.float32)
    blocks = {"BLOCK": _BLOCK, "COLUMNS": _COLUMNS}
    launch(_weight_backward, num_blocks * num_tiles(D, _COLUMNS), grad, x, scale, partials, R, D, **blocks)
    return grad_x, sum_columns(partials).to(weight_D.dtype)


@triton.jit(do_not_specialize=["R"])
def _norm(x, weight, y, scale, R, D, eps, ROWS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    squares = tl.zeros((ROWS, LANES), tl.float32)
    for first in range(0, D, LANES):
        x_tile = load_rows(x, row, R, first + lane, D, 0.0)
        squares += x_tile * x_tile
    mean = tl.div_rn(tree_sum(squares, ROWS, LANES), tl.full((ROWS,), D, tl.float32))
    factor = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    tl.store(scale + row, factor, mask=row < R)
    for first in range(0, D, LANES):
        column = first + lane
        weight_tile = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
        x_tile = load_rows(x, row, R, column, D, 0.0)
        store_rows(y, row, R, column, D, x_tile * factor[:, None] * weight_tile[None, :])


@triton.jit(do_not_specialize=["R"])
def _norm_backward(grad, x, weight, scale, grad_x, R, D, ROWS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    products = tl.zeros((ROWS, LANES), tl.float32)
    for first in range(0, D, LANES):
        column = first + lane
        weight_tile = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
        weighted = load_rows(grad, row, R, column, D, 0.0) * weight_tile[None, :]
        products += weighted * load_rows(x, row, R, column, D, 0.0)
    factor = tl.load(scale + row, mask=row < R, other=0.0)
    shift = tl.div_rn(tree_sum(products, ROWS, LANES), tl.full((ROWS,), D, tl.float32)) * (factor * factor)
    for first in range(0, D, LANES):
        column = first + lane
        weight_tile = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
        weighted = load_rows(grad, row, R, column, D, 0.0) * weight_tile[None, :]
        away = load_rows(x, row, R, column, D, 0.0) * shift[:, None]
        store_rows(grad_x, row, R, column, D, factor[:, None] * (weighted - away))


@triton.jit(do_not_specialize=["R"])
def _weight_backward(grad, x, scale, partials, R, D, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    num_tiles = tl.cdiv(D, COLUMNS)
    block = tl.program_id(0) // num_tiles
    column = tl.program_id(0) % num_tiles * COLUMNS + tl.arange(0, COLUMNS)
    first = block.to(tl.int64) * BLOCK
    at = first * D + column
    total = tl.zeros((COLUMNS,), tl.float32)
    for row in range(first, min(R, first + BLOCK)):
        grad_row = tl.load(grad + at, mask=column < D, other=0.0).to(tl.float32)
        x_row = tl.load(x + at, mask=column < D, other=0.0).to(tl.float32)
        total += grad_row * (x_row * tl.load(scale + row))
        at += D
    tl.store(partials + block.to(tl.int64) * D + column, total, mask=column < D)
