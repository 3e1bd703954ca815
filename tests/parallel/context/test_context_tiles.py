"""The tiles of a rank cover what a causal document mask lets it see, no pair twice, and skip what nobody sees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.parallel.context.documents import describe, is_seen, visible_tiles
from drumline.parallel.context.split import ContextSplit
from drumline.parallel.context.tiles import Tile, tiles_of

DEGREE = st.integers(1, 4)
CHUNK = st.integers(1, 6)


@st.composite
def rows_of_documents(draw):
    degree, chunk = draw(DEGREE), draw(CHUNK)
    num_tokens = 2 * degree * chunk
    edges = [sorted({0} | draw(st.sets(st.integers(0, num_tokens - 1), max_size=4))) for _ in range(2)]
    starts = [[max(e for e in row if e <= t) for t in range(num_tokens)] for row in edges]
    return degree, chunk, torch.tensor(starts, dtype=torch.int32)


def times_computed(tiles, documents, split, key_chunks, chunk, num_rows):
    """How often each pair of a query and a key of the block is taken into a sum, [B, queries, keys of the sequence]."""
    num_tokens = 2 * split.degree * chunk
    keys = torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in key_chunks])
    count = torch.zeros(num_rows, 2 * chunk, num_tokens, dtype=torch.int64)
    for tile in tiles:
        height, width = tile.rows.stop - tile.rows.start, tile.columns.stop - tile.columns.start
        taken = torch.ones(num_rows, height, width, dtype=torch.bool)
        if tile.is_cut:
            taken &= is_seen(documents, tile, keys)
        if tile.is_causal:
            assert height == width
            taken = taken.tril()
        count[:, tile.rows, keys[tile.columns]] += taken
    return count


@given(rows_of_documents(), st.booleans())
def test_ring_blocks_together_are_the_mask(example, has_documents):
    degree, chunk, starts = example
    for rank in range(degree):
        split = ContextSplit(degree, rank)
        documents = describe(split.shard(starts), 2) if has_documents else None
        count = torch.zeros(())
        for origin in range(degree):
            chunks = split.chunks_of(origin)
            tiles = visible_tiles(split.chunks, chunks, chunk, documents)
            count = count + times_computed(tiles, documents, split, chunks, chunk, 2)
        assert torch.equal(count, wanted(split, starts if has_documents else None, 2 * degree * chunk))


@given(rows_of_documents())
def test_gathered_chunks_are_the_mask(example):
    degree, chunk, starts = example
    for rank in range(degree):
        split, chunks = ContextSplit(degree, rank), range(2 * degree)
        documents = describe(split.shard(starts), 2)
        tiles = visible_tiles(split.chunks, chunks, chunk, documents)
        count = times_computed(tiles, documents, split, chunks, chunk, 2)
        assert torch.equal(count, wanted(split, starts, 2 * degree * chunk))


def wanted(split, starts, num_tokens):
    i, j = split.positions(num_tokens), torch.arange(num_tokens)
    seen = (j <= i[:, None]).expand(2, -1, -1)
    if starts is not None:
        seen = seen & (j >= split.shard(starts)[:, :, None])
    return seen.long()


def test_under_a_causal_mask_every_rank_computes_as_much_in_one_rectangle_a_step():
    degree, size = 4, 8
    for rank in range(degree):
        split = ContextSplit(degree, rank)
        for step in range(degree):
            tiles = tiles_of(split.chunks, split.chunks_of((rank - step) % degree), size)
            assert len(tiles) == 1
            area = (tiles[0].rows.stop - tiles[0].rows.start) * (tiles[0].columns.stop - tiles[0].columns.start)
            assert area == (4 if step == 0 else 2) * size**2
            assert tiles[0].is_causal == (step == 0)


def test_what_documents_hide_is_not_computed():
    """The tail chunk's document begins in it, so that no earlier chunk is met at all."""
    split = ContextSplit(2, 0)
    starts = torch.tensor([[0] * 12 + [12] * 4], dtype=torch.int32)
    documents = describe(split.shard(starts), 2)
    assert visible_tiles(split.chunks, split.chunks_of(1), 4, documents) == []
    own = visible_tiles(split.chunks, split.chunks, 4, documents)
    assert own == [
        Tile(slice(0, 4), slice(0, 4), is_causal=True, is_cut=False),
        Tile(slice(4, 8), slice(4, 8), is_causal=True, is_cut=False),
    ]


@pytest.mark.parametrize(
    ("chunk", "pieces"), [(1, 1), (500, 1), (512, 1), (1024, 2), (1536, 3), (1300, 4), (523, 1), (2 * 523, 1)]
)
def test_long_chunks_are_cut_into_pieces_of_at_most_512_where_they_can_be_cut_evenly(chunk, pieces):
    documents = describe(torch.zeros(1, 2 * chunk, dtype=torch.int32), 2)
    assert documents.pieces_a_chunk == pieces
    assert len(documents.ranges) == 2 * pieces
