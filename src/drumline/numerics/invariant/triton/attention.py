"""Causal attention, forward: keys in tiles of 64 at absolute positions of the row, ascending, one running maximum.

A tile of which a query sees nothing multiplies its sums by one and adds zeros, so neither later tokens nor queries
beside change its bits. The weights' sum goes by 64 lanes, one for each place in a tile, and their tree.

B sequences, S tokens, T <= S of them with queries, H query heads, G key/value heads, K head width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumline.numerics.invariant.triton.launch import launch, num_tiles
from drumline.numerics.invariant.triton.rotate import rotate
from drumline.numerics.invariant.triton.tiles import product, tree_sum

TILE = 64


def forward(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, cos_SK2: Tensor, sin_SK2: Tensor, starts_BS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The result [B, T, H, K] in q's dtype, and the fp32 logsumexp [B, H, T] of scaled scores."""
    (B, T, H, K), (S, G) = q_BTHK.shape, k_BSGK.shape[1:3]
    q = rotate(q_BTHK, cos_SK2[S - T :], sin_SK2[S - T :], q_BTHK.dtype)
    k, v = rotate(k_BSGK, cos_SK2, sin_SK2, k_BSGK.dtype), v_BSGK.contiguous()
    out, logsumexp = torch.empty_like(q), q.new_empty((B, H, T), dtype=torch.float32)
    launch(
        _attend,
        B * H * num_tiles(T, TILE),
        *(q, k, v, starts_or(q, starts_BS), out, logsumexp, K**-0.5, T, S, H, G, K),
        HAS_STARTS=starts_BS is not None,
        TILE=TILE,
        WIDTH=padded(K),
        num_stages=2,
    )
    return out, logsumexp


def starts_or(placeholder: Tensor, starts_BS: Tensor | None) -> Tensor:
    """The starts as int32, or a tensor that is never read in their place."""
    return placeholder if starts_BS is None else starts_BS.to(torch.int32).contiguous()


def padded(width: int) -> int:
    """The head width that a tile has: a power of two that matrix units take."""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def load_heads(x, sequence, token, S, head, H, K, lane):
    """A tile [tokens, K] of one head of a contiguous [B, S, H, K]; zeros beyond its edges."""
    at = ((sequence * S + token)[:, None] * H + head) * K + lane[None, :]
    return tl.load(x + at, mask=((token >= 0) & (token < S))[:, None] & (lane < K)[None, :], other=0.0)


@triton.jit
def masked_scores(
    q_tile, k_tile, starts, scale, sequence, query, key, S,
    HAS_STARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Scaled scores [queries, keys]; minus infinity where a query does not see a key."""
    score = product(q_tile, tl.trans(k_tile), tl.zeros((TILE, TILE), tl.float32)) * scale
    is_seen = (key[None, :] <= query[:, None]) & (query < S)[:, None]
    if HAS_STARTS:
        start = tl.load(starts + sequence * S + query, mask=query < S, other=0)
        is_seen = is_seen & (key[None, :] >= start[:, None])
    return tl.where(is_seen, score, float("-inf"))


@triton.jit(do_not_specialize=["T", "S"])
def _attend(
    q, k, v, starts, out, logsumexp, scale, T, S, H, G, K,
    HAS_STARTS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(T, TILE)
    tile = tl.program_id(0) % num_tiles
    head = tl.program_id(0) // num_tiles % H
    sequence = (tl.program_id(0) // num_tiles // H).to(tl.int64)
    place, lane = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    query = S - T + place
    q_tile = load_heads(q, sequence, place, T, head, H, K, lane)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    weights = tl.zeros((TILE, TILE), tl.float32)
    total = tl.zeros((TILE, WIDTH), tl.float32)
    for first in range(0, min(S, S - T + (tile + 1) * TILE), TILE):
        key = first + tl.arange(0, TILE)
        k_tile = load_heads(k, sequence, key, S, head // (H // G), G, K, lane)
        v_tile = load_heads(v, sequence, key, S, head // (H // G), G, K, lane)
        score = masked_scores(q_tile, k_tile, starts, scale, sequence, query, key, S, HAS_STARTS, TILE)
        higher = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a query that has seen nothing yet
        shrink = tl.exp(top - shift)[:, None]
        weight = tl.exp(score - shift[:, None])
        weights = weights * shrink + weight
        total = product(weight.to(v_tile.dtype), v_tile, total * shrink)
        top = higher
    weight_sum = tl.where(place < T, tree_sum(weights, TILE, TILE), 1.0)
    tl.store(logsumexp + (sequence * H + head) * T + place, top + tl.log(weight_sum), mask=place < T)
    value = tl.div_rn(total, tl.broadcast_to(weight_sum[:, None], (TILE, WIDTH)))
    at = ((sequence * T + place)[:, None] * H + head) * K + lane[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=(place < T)[:, None] & (lane < K)[None, :])
