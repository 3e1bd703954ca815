"""Causal attention, backward: tiles of 64 at absolute positions; every gradient is one chain over tiles, ascending.

    P = exp(s - logsumexp)     dP = dO V^T     ds = P (dP - sum(dO O))     dQ = ds K     dK = ds^T Q     dV = P^T dO
A query's gradient sums over its keys' tiles; a key's over its group's heads, and for each over the queries' tiles. So
no two programs add to one element. Source: Dao 2023, arXiv:2307.08691, algorithm 2, with two passes for one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumline.numerics.invariant.triton.attention import TILE, load_heads, masked_scores, padded, starts_or
from drumline.numerics.invariant.triton.launch import lanes, launch, num_tiles
from drumline.numerics.invariant.triton.rotate import rotate
from drumline.numerics.invariant.triton.tiles import load_rows, product, tree_sum

_ROWS = 16


def backward(
    grad_BSHK: Tensor,
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    cos_SK2: Tensor,
    sin_SK2: Tensor,
    starts_BS: Tensor | None,
    out_BSHK: Tensor,
    logsumexp_BHS: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v in their dtypes, for queries of all S tokens."""
    (B, S, H, K), G = q_BSHK.shape, k_BSGK.shape[2]
    q, k = (rotate(x, cos_SK2, sin_SK2, x.dtype) for x in (q_BSHK, k_BSGK))
    v, grad, logsumexp = v_BSGK.contiguous(), grad_BSHK.to(q.dtype).contiguous(), logsumexp_BHS.contiguous()
    shift = q.new_empty((B, S, H), dtype=torch.float32)
    R = B * S * H
    launch(_shift, num_tiles(R, _ROWS), grad, out_BSHK.contiguous(), shift, R, K, ROWS=_ROWS, LANES=lanes(K))
    given = (q, k, v, grad, starts_or(q, starts_BS), logsumexp, shift)
    sizes = (K**-0.5, S, H, G, K)
    tile = {"HAS_STARTS": starts_BS is not None, "TILE": TILE, "WIDTH": padded(K), "num_stages": 2}
    turned_q, turned_k = (torch.empty_like(x, dtype=torch.float32) for x in (q, k))
    grad_v = torch.empty_like(v)
    launch(_queries_backward, B * H * num_tiles(S, TILE), *given, turned_q, *sizes, **tile)
    launch(_keys_backward, B * G * num_tiles(S, TILE), *given, turned_k, grad_v, *sizes, **tile)
    grad_q = rotate(turned_q, cos_SK2, sin_SK2, q.dtype, backward=True)
    return grad_q, rotate(turned_k, cos_SK2, sin_SK2, k.dtype, backward=True), grad_v


@triton.jit(do_not_specialize=["R"])
def _shift(grad, out, shift, R, K, ROWS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, LANES), tl.float32)
    for first in range(0, K, LANES):
        lane = first + tl.arange(0, LANES)
        total += load_rows(grad, row, R, lane, K, 0.0) * load_rows(out, row, R, lane, K, 0.0)
    tl.store(shift + row, tree_sum(total, ROWS, LANES), mask=row < R)


@triton.jit
def _weights(
    q_tile, k_tile, v_tile, grad_tile, starts, logsumexp, shift, scale, sequence, query, key, head, S, H,
    HAS_STARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile's weights P and the gradient ds of its scores."""
    score = masked_scores(q_tile, k_tile, starts, scale, sequence, query, key, S, HAS_STARTS, TILE)
    of_query = tl.load(logsumexp + (sequence * H + head) * S + query, mask=query < S, other=0.0)
    weight = tl.exp(score - of_query[:, None])
    grad_weight = product(grad_tile, tl.trans(v_tile), tl.zeros((TILE, TILE), tl.float32))
    away = tl.load(shift + (sequence * S + query) * H + head, mask=query < S, other=0.0)
    return weight, weight * (grad_weight - away[:, None]) * scale


@triton.jit(do_not_specialize=["S"])
def _queries_backward(
    q, k, v, grad, starts, logsumexp, shift, grad_q, scale, S, H, G, K,
    HAS_STARTS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(S, TILE)
    tile = tl.program_id(0) % num_tiles
    head = tl.program_id(0) // num_tiles % H
    sequence = (tl.program_id(0) // num_tiles // H).to(tl.int64)
    query, lane = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    q_tile = load_heads(q, sequence, query, S, head, H, K, lane)
    grad_tile = load_heads(grad, sequence, query, S, head, H, K, lane)
    total = tl.zeros((TILE, WIDTH), tl.float32)
    for first in range(0, min(S, (tile + 1) * TILE), TILE):
        key = first + tl.arange(0, TILE)
        k_tile = load_heads(k, sequence, key, S, head // (H // G), G, K, lane)
        v_tile = load_heads(v, sequence, key, S, head // (H // G), G, K, lane)
        _, grad_score = _weights(
            q_tile, k_tile, v_tile, grad_tile, starts, logsumexp, shift, scale, sequence, query, key, head, S, H,
            HAS_STARTS, TILE,
        )  # fmt: skip
        total = product(grad_score.to(k_tile.dtype), k_tile, total)
    at = ((sequence * S + query)[:, None] * H + head) * K + lane[None, :]
    tl.store(grad_q + at, total, mask=(query < S)[:, None] & (lane < K)[None, :])


@triton.jit(do_not_specialize=["S"])
def _keys_backward(
    q, k, v, grad, starts, logsumexp, shift, grad_k, grad_v, scale, S, H, G, K,
    HAS_STARTS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(S, TILE)
    tile = tl.program_id(0) % num_tiles
    kv_head = tl.program_id(0) // num_tiles % G
    sequence = (tl.program_id(0) // num_tiles // G).to(tl.int64)
    key, lane = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    k_tile = load_heads(k, sequence, key, S, kv_head, G, K, lane)
    v_tile = load_heads(v, sequence, key, S, kv_head, G, K, lane)
    of_k, of_v = tl.zeros((TILE, WIDTH), tl.float32), tl.zeros((TILE, WIDTH), tl.float32)
    for member in range(H // G):
        head = kv_head * (H // G) + member
        for first in range(tile * TILE, S, TILE):
            query = first + tl.arange(0, TILE)
            q_tile = load_heads(q, sequence, query, S, head, H, K, lane)
            grad_tile = load_heads(grad, sequence, query, S, head, H, K, lane)
            weight, grad_score = _weights(
                q_tile, k_tile, v_tile, grad_tile, starts, logsumexp, shift, scale, sequence, query, key, head, S, H,
                HAS_STARTS, TILE,
            )  # fmt: skip
            of_v = product(tl.trans(weight.to(grad_tile.dtype)), grad_tile, of_v)
            of_k = product(tl.trans(grad_score.to(q_tile.dtype)), q_tile, of_k)
    at = ((sequence * S + key)[:, None] * G + kv_head) * K + lane[None, :]
    is_inside = (key < S)[:, None] & (lane < K)[None, :]
    tl.store(grad_k + at, of_k, mask=is_inside)
    tl.store(grad_v + at, of_v.to(grad_v.dtype.element_ty), mask=is_inside)
