"""Sums over the last dim, and over the last dim but one, in an order fixed by their length.

A row: pieces of 16,384 elements at absolute places; within one, 1,024 lanes that each add every 1,024th element, then
the tree over lanes; the pieces' sums are a row that is summed likewise. A column: blocks of 64 rows, each a chain; the
blocks' sums are a column that is summed likewise.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumline.numerics.invariant.triton.launch import lanes, launch, num_tiles
from drumline.numerics.invariant.triton.tiles import load_rows, tree_sum

_PIECE, _ROWS, _BLOCK, _COLUMNS = 16_384, 4, 64, 256


def sum_rows(x: Tensor) -> Tensor:
    """The sum over the last dim, in fp32."""
    width = x.shape[-1]
    if not width:
        return x.new_zeros(x.shape[:-1], dtype=torch.float32)
    num_pieces, num_rows = num_tiles(width, _PIECE), x.shape[:-1].numel()
    out = x.new_empty((*x.shape[:-1], num_pieces), dtype=torch.float32)
    launch(
        _sum_rows,
        num_tiles(num_rows, _ROWS) * num_pieces,
        *(x.contiguous(), out, num_rows, width, num_pieces),
        ROWS=_ROWS,
        PIECE=_PIECE,
        LANES=lanes(width),
    )
    return sum_rows(out) if num_pieces > 1 else out[..., 0]


def sum_columns(x: Tensor) -> Tensor:
    """The sum over the last dim but one, in fp32."""
    *outer, height, width = x.shape
    num_blocks, num_outer = num_tiles(height, _BLOCK), torch.Size(outer).numel()
    if not height:
        return x.new_zeros((*outer, width), dtype=torch.float32)
    out = x.new_empty((*outer, num_blocks, width), dtype=torch.float32)
    launch(
        _sum_columns,
        num_outer * num_blocks * num_tiles(width, _COLUMNS),
        *(x.contiguous(), out, height, width, num_blocks),
        BLOCK=_BLOCK,
        COLUMNS=_COLUMNS,
    )
    return sum_columns(out) if num_blocks > 1 else out.squeeze(-2)


@triton.jit(do_not_specialize=["R", "P"])
def _sum_rows(x, out, R, D, P, ROWS: tl.constexpr, PIECE: tl.constexpr, LANES: tl.constexpr):
    piece = tl.program_id(0) % P
    row = tl.program_id(0) // P * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, LANES), tl.float32)
    for first in range(piece * PIECE, min(D, (piece + 1) * PIECE), LANES):
        total += load_rows(x, row, R, first + tl.arange(0, LANES), D, 0.0)
    tl.store(out + row.to(tl.int64) * P + piece, tree_sum(total, ROWS, LANES), mask=row < R)


@triton.jit(do_not_specialize=["R", "P"])
def _sum_columns(x, out, R, D, P, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    num_tiles = tl.cdiv(D, COLUMNS)
    block = tl.program_id(0) // num_tiles
    column = tl.program_id(0) % num_tiles * COLUMNS + tl.arange(0, COLUMNS)
    first = block % P * BLOCK
    at = x + ((block // P).to(tl.int64) * R + first) * D + column
    total = tl.zeros((COLUMNS,), tl.float32)
    for _ in range(first, min(R, first + BLOCK)):
        total += tl.load(at, mask=column < D, other=0.0).to(tl.float32)
        at += D
    tl.store(out + block.to(tl.int64) * D + column, total, mask=column < D)
