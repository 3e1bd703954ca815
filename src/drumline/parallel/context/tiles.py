"""Which rectangles of the attention matrix a rank has to compute when it meets a block of keys.

Queries and keys are held as equal pieces of consecutive positions, pieces in ascending order. Query piece p sees the
key pieces before it whole and its own up to the diagonal; a document that starts in piece s hides those before s. Key
pieces are ascending too, so what a query piece sees of a block is one run of whole pieces, then perhaps the diagonal.
Neighbouring query pieces that see the same run share a rectangle. What no query sees is in no rectangle.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """A rectangle of queries against keys.

    Attributes:
        rows: which of the rank's queries.
        columns: which of the block's keys.
        is_causal: on the diagonal: square, and row i sees columns 0 .. i only.
        is_cut: a document of these rows starts behind the first column, so that a mask is needed.
    """

    rows: slice
    columns: slice
    is_causal: bool
    is_cut: bool


@dataclass(frozen=True)
class StartRange:
    """Earliest and latest start, as positions in the whole row, of the documents that a piece's tokens are in."""

    earliest: int
    latest: int


def tiles_of(
    query_pieces: Sequence[int], key_pieces: Sequence[int], size: int, starts: Sequence[StartRange] | None = None
) -> list[Tile]:
    """The rectangles of one block, in ascending order of queries, each pair of query and key in at most one.

    Args:
        query_pieces: numbers of the rank's pieces, ascending.
        key_pieces: numbers of the block's pieces, ascending.
        size: tokens of a piece.
        starts: of the documents of each query piece; None: one document.

    Returns:
        The tiles.
    """
    whole = slice(0, len(query_pieces) * size)
    if starts is None and tuple(query_pieces) == tuple(key_pieces):
        return [Tile(whole, whole, is_causal=True, is_cut=False)]
    tiles: list[Tile] = []
    for index, piece in enumerate(query_pieces):
        rows = slice(index * size, (index + 1) * size)
        range_ = StartRange(0, 0) if starts is None else starts[index]
        first = sum((key + 1) * size <= range_.earliest for key in key_pieces)
        last = sum(key < piece for key in key_pieces)
        if first < last:
            is_cut = range_.latest > key_pieces[first] * size
            _add(tiles, Tile(rows, slice(first * size, last * size), is_causal=False, is_cut=is_cut))
        if piece in key_pieces:
            is_cut = range_.latest > piece * size
            tiles.append(Tile(rows, slice(last * size, (last + 1) * size), is_causal=True, is_cut=is_cut))
    return tiles


def _add(tiles: list[Tile], tile: Tile) -> None:
    """Appends a rectangle, or lets the one before grow by its rows."""
    if tiles and not tiles[-1].is_causal:
        before = tiles[-1]
        if before.columns == tile.columns and before.rows.stop == tile.rows.start:
            rows = slice(before.rows.start, tile.rows.stop)
            tiles[-1] = Tile(rows, tile.columns, is_causal=False, is_cut=before.is_cut or tile.is_cut)
            return
    tiles.append(tile)
