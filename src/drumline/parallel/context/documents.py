"""Document masks of a rank's queries against any block of keys, made tile by tile and never whole.

Query i sees key j where starts[i] <= position[j] <= position[i]. A rank knows the starts of its own queries, and that
is all it needs: nothing about other ranks' documents is communicated.

B sequences, T tokens of this rank, I rows of a tile, J columns of a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drumline.parallel.context.tiles import StartRange, Tile, tiles_of

MAX_PIECE = 512
"""Longest piece that tiles are made of under documents: shorter ones skip more of what no query sees, in more calls."""


@dataclass(frozen=True)
class Documents:
    """The starts of this rank's queries, and how its chunks are cut into pieces.

    Attributes:
        starts_BT: for each query the position in the whole row of its document's first token.
        pieces_a_chunk: into how many pieces every chunk is cut.
        ranges: of each of this rank's pieces, over all sequences.
    """

    starts_BT: torch.Tensor
    pieces_a_chunk: int
    ranges: tuple[StartRange, ...]


def describe(starts_BT: torch.Tensor, num_chunks: int) -> Documents:
    """Prepares the documents of a rank's queries; reads them on the host once.

    Args:
        starts_BT: int32 [B, T].
        num_chunks: that the T tokens are made of.

    Returns:
        What `masked_tiles` takes.
    """
    chunk = starts_BT.shape[1] // num_chunks
    pieces_a_chunk = _pieces_a_chunk(chunk)
    pieces = starts_BT.unflatten(1, (num_chunks * pieces_a_chunk, -1))
    ends = torch.stack([pieces.amin((0, 2)), pieces.amax((0, 2))], dim=1).tolist()
    return Documents(starts_BT, pieces_a_chunk, tuple(StartRange(*pair) for pair in ends))


def _pieces_a_chunk(chunk: int) -> int:
    """As few equal pieces as are short enough; one where that would take pieces too short to be worth a call."""
    counts = range(1, 4 * chunk // MAX_PIECE + 1)
    return next((n for n in counts if chunk % n == 0 and chunk // n <= MAX_PIECE), 1)


def visible_tiles(
    query_chunks: Sequence[int], key_chunks: Sequence[int], chunk: int, documents: Documents | None
) -> list[Tile]:
    """The tiles of a block of chunks, cut into pieces where there are documents.

    Args:
        query_chunks: numbers of the rank's chunks, ascending.
        key_chunks: numbers of the block's chunks, ascending.
        chunk: tokens of a chunk.
        documents: of the queries; None: one document.

    Returns:
        The tiles.
    """
    if documents is None:
        return tiles_of(query_chunks, key_chunks, chunk)
    n = documents.pieces_a_chunk
    queries, keys = ([c * n + p for c in chunks for p in range(n)] for chunks in (query_chunks, key_chunks))
    return tiles_of(queries, keys, chunk // n, documents.ranges)


def is_seen(documents: Documents, tile: Tile, key_positions_T: torch.Tensor) -> torch.Tensor:
    """Which columns of a tile lie in the documents of its rows; the diagonal is left to who computes the tile.

    Args:
        documents: of the rank's queries.
        tile: from `visible_tiles`.
        key_positions_T: positions in the whole row of the block's keys.

    Returns:
        bool [B, I, J].
    """
    return key_positions_T[tile.columns] >= documents.starts_BT[:, tile.rows, None]
