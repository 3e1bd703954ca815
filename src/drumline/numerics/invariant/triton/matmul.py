"""A matmul with fixed tiles: a chain over k in ascending order, 32 products a step, whatever the number of rows.

No split of k, no tuning by shape. Within a step the order is that of the device's matrix unit, or for fp32 of fused
multiply-adds; an element's place in the tile has no part in it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumline.numerics.invariant.triton.launch import launch, num_tiles
from drumline.numerics.invariant.triton.tiles import product

_STEP = 32
_TILES = {torch.float32: (64, 64, 4), torch.bfloat16: (128, 128, 8)}
"""Rows and columns of a tile, and its warps: by dtype alone."""


def matmul(a_MK: Tensor, b_KN: Tensor, out_dtype: torch.dtype, start_MN: Tensor | None) -> Tensor:
    """start + a b, summed in fp32.

    Args:
        a_MK: fp32 or bf16, any strides.
        b_KN: of the same dtype.
        out_dtype: of the result.
        start_MN: fp32; None: zero.

    Returns:
        The product [M, N].
    """
    (M, K), N = a_MK.shape, b_KN.shape[1]
    out = a_MK.new_empty((M, N), dtype=out_dtype)
    start = out if start_MN is None else start_MN.contiguous()
    rows, columns, num_warps = _TILES[a_MK.dtype]
    launch(
        _matmul,
        num_tiles(M, rows) * num_tiles(N, columns),
        *(a_MK, b_KN, start, out, M, N, K, *a_MK.stride(), *b_KN.stride()),
        num_warps=num_warps,
        HAS_START=start_MN is not None,
        ROWS=rows,
        COLUMNS=columns,
        STEP=_STEP,
    )
    return out


@triton.jit(do_not_specialize=["M", "N", "K"])
def _matmul(
    a, b, start, out, M, N, K, a_m, a_k, b_k, b_n,
    HAS_START: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    num_columns = tl.cdiv(N, COLUMNS)
    m = (tl.program_id(0) // num_columns).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = (tl.program_id(0) % num_columns).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, STEP).to(tl.int64)
    is_m, is_n = (m < M)[:, None], (n < N)[None, :]
    at = m[:, None] * N + n[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if HAS_START:
        total = tl.load(start + at, mask=is_m & is_n, other=0.0)
    a_at = a + m[:, None] * a_m + k[None, :] * a_k
    b_at = b + k[:, None] * b_k + n[None, :] * b_n
    for first in range(0, K, STEP):
        is_k = k < K - first
        a_tile = tl.load(a_at, mask=is_m & is_k[None, :], other=0.0)
        b_tile = tl.load(b_at, mask=is_k[:, None] & is_n, other=0.0)
        total = product(a_tile, b_tile, total)
        a_at += STEP * a_k
        b_at += STEP * b_k
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_m & is_n)
