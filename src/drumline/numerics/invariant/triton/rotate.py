"""Rotary positions: pairs (u, w) of a head's halves turned by a token's angle, element by element."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumline.numerics.invariant.triton.launch import lanes, launch, num_tiles
from drumline.numerics.invariant.triton.tiles import load_rows, store_rows

_ROWS = 64


def rotate(x_BTHK: Tensor, cos_T2: Tensor, sin_T2: Tensor, dtype: torch.dtype, *, backward: bool = False) -> Tensor:
    """Heads turned by their tokens' angles, or back, computed in fp32 and rounded once to a dtype."""
    x = x_BTHK.contiguous()
    _, T, H, K = x.shape
    out = torch.empty_like(x, dtype=dtype)
    R = x.shape[:-1].numel()
    angles = (cos_T2.float().contiguous(), sin_T2.float().contiguous())
    tile = {"IS_BACKWARD": backward, "ROWS": _ROWS, "LANES": lanes(K // 2)}
    launch(_rotate, num_tiles(R, _ROWS), x, *angles, out, R, T, H, K // 2, **tile)
    return out


@triton.jit(do_not_specialize=["R", "T"])
def _rotate(x, cos, sin, out, R, T, H, K2, IS_BACKWARD: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    token = row // H % T
    c = load_rows(cos, token, T, lane, K2, 0.0)
    s = load_rows(sin, token, T, lane, K2, 0.0)
    if IS_BACKWARD:
        s = -s
    u = load_rows(x, 2 * row, 2 * R, lane, K2, 0.0)
    w = load_rows(x, 2 * row + 1, 2 * R, lane, K2, 0.0)
    store_rows(out, 2 * row, 2 * R, lane, K2, u * c - w * s)
    store_rows(out, 2 * row + 1, 2 * R, lane, K2, w * c + u * s)
