"""A rank's queries against one block of keys and values: the tiles it sees, one after the other.

What ring and all-gather share. The forward merges every tile into accumulators; the backward adds every tile's share
of the gradients.

B sequences, T tokens of this rank, S tokens of the block, H query heads, G key/value heads, K head width, 2 = keys and
values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drumline.parallel.context.documents import Documents, is_seen, visible_tiles
from drumline.parallel.context.partial import Mask, attend_part, attend_part_backward, merge_
from drumline.parallel.context.split import ContextSplit
from drumline.parallel.context.tiles import Tile


@dataclass(frozen=True)
class Block:
    """Which keys a rank's queries meet.

    Attributes:
        split: this rank's place.
        key_chunks: numbers of the chunks that the block's keys are, ascending.
        documents: of the queries; None: one document.
    """

    split: ContextSplit
    key_chunks: Sequence[int]
    documents: Documents | None

    def tiles(self, num_tokens: int) -> list[Tile]:
        """The tiles for a rank that holds `num_tokens` queries."""
        return visible_tiles(self.split.chunks, self.key_chunks, num_tokens // 2, self.documents)

    def mask(self, tile: Tile, num_tokens: int) -> Mask:
        """What the rows of a tile see; None: all, up to the diagonal."""
        if self.documents is None or not tile.is_cut:
            return None
        chunk, device = num_tokens // 2, self.documents.starts_BT.device
        within = torch.arange(chunk, device=device)
        positions = torch.cat([c * chunk + within for c in self.key_chunks])
        return is_seen(self.documents, tile, positions)


@dataclass
class Result:
    """Accumulators of the forward, fp32 at least."""

    out_BHTK: torch.Tensor
    lse_BHT: torch.Tensor


def nothing_seen(q_BHTK: torch.Tensor) -> Result:
    """The result over no keys at all."""
    batch, heads, tokens, width = q_BHTK.shape
    dtype = torch.promote_types(q_BHTK.dtype, torch.float32)
    # Tokens outside heads in memory, as the projection that follows wants them.
    out_BTHK = torch.zeros((batch, tokens, heads, width), dtype=dtype, device=q_BHTK.device)
    lse_BHT = torch.full((batch, heads, tokens), float("-inf"), dtype=dtype, device=q_BHTK.device)
    return Result(out_BTHK.transpose(1, 2), lse_BHT)


def attend_block(q_BHTK: torch.Tensor, kv_2BGSK: torch.Tensor, block: Block, result: Result) -> None:
    """Adds a block to the result, in place.

    Args:
        q_BHTK: rotated queries.
        kv_2BGSK: rotated keys, and values.
        block: which keys they are.
        result: over the blocks so far.
    """
    num_tokens = q_BHTK.shape[2]
    for tile in block.tiles(num_tokens):
        rows, columns = tile.rows, tile.columns
        k, v = kv_2BGSK[:, :, :, columns]
        out, lse = attend_part(q_BHTK[:, :, rows], k, v, block.mask(tile, num_tokens), tile.is_causal)
        merge_(result.out_BHTK[:, :, rows], result.lse_BHT[:, :, rows], out, lse)


def attend_block_backward(
    grad_out_BHTK: torch.Tensor,
    q_BHTK: torch.Tensor,
    kv_2BGSK: torch.Tensor,
    out_BHTK: torch.Tensor,
    lse_BHT: torch.Tensor,
    block: Block,
    grad_q_BHTK: torch.Tensor,
    grad_kv_2BGSK: torch.Tensor,
) -> None:
    """Adds a block's share of the gradients, in place.

    Args:
        grad_out_BHTK: gradient of the result over all blocks.
        q_BHTK: as in the forward.
        kv_2BGSK: likewise.
        out_BHTK: the result over all blocks, in q's dtype.
        lse_BHT: the logsumexp over all blocks.
        block: which keys they are.
        grad_q_BHTK: fp32 at least, over the blocks so far.
        grad_kv_2BGSK: fp32 at least, of this block.
    """
    num_tokens = q_BHTK.shape[2]
    for tile in block.tiles(num_tokens):
        rows, columns = tile.rows, tile.columns
        k, v = kv_2BGSK[:, :, :, columns]
        grad_q, grad_k, grad_v = attend_part_backward(
            grad_out_BHTK[:, :, rows],
            *(q_BHTK[:, :, rows], k, v, out_BHTK[:, :, rows], lse_BHT[:, :, rows]),
            *(block.mask(tile, num_tokens), tile.is_causal),
        )
        grad_q_BHTK[:, :, rows] += grad_q
        grad_kv_2BGSK[0, :, :, columns] += grad_k
        grad_kv_2BGSK[1, :, :, columns] += grad_v


def pack(k_BTGK: torch.Tensor, v_BTGK: torch.Tensor) -> torch.Tensor:
    """Keys and values as one contiguous tensor [2, B, G, T, K]: one message, and heads as the kernels want them."""
    return torch.stack([k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)])


def zeros_wide(like: torch.Tensor) -> torch.Tensor:
    """Zeros in fp32 at least: what gradients are added up in."""
    return torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
