import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.data import Batch
from drumline.parallel.context import ContextSplit, unshard
from drumline.recipe.errors import DrumlineError

DEGREE = st.integers(1, 9)
CHUNK = st.integers(1, 5)


@given(DEGREE, CHUNK)
def test_ranks_hold_every_position_once_and_in_ascending_order(degree, chunk):
    num_tokens = 2 * degree * chunk
    held = [ContextSplit(degree, rank).positions(num_tokens).tolist() for rank in range(degree)]
    assert sorted(itertools.chain(*held)) == list(range(num_tokens))
    assert all(positions == sorted(positions) for positions in held)


@given(DEGREE, CHUNK)
def test_every_rank_sees_the_same_number_of_keys(degree, chunk):
    num_tokens = 2 * degree * chunk
    seen = {int((ContextSplit(degree, rank).positions(num_tokens) + 1).sum()) for rank in range(degree)}
    assert len(seen) == 1


@given(DEGREE, CHUNK, st.sampled_from([(), (3,), (2, 4)]))
def test_unshard_undoes_shard(degree, chunk, rest):
    whole = torch.arange(2 * 2 * degree * chunk).reshape(2, -1)
    whole = whole.reshape(*whole.shape, *(1 for _ in rest)).expand(*whole.shape, *rest)
    parts = [ContextSplit(degree, rank).shard(whole) for rank in range(degree)]
    assert torch.equal(unshard(parts), whole)
    positions = ContextSplit(degree, degree - 1).positions(whole.shape[1])
    assert torch.equal(parts[-1], whole[:, positions])


@given(st.integers(1, 4), st.integers(1, 4), CHUNK)
def test_neighbours_together_hold_a_rank_of_the_coarser_split(rings, ulysses, chunk):
    """What lets Ulysses groups be the ranks of a ring."""
    num_tokens = 2 * rings * ulysses * chunk
    for ring in range(rings):
        ranks = range(ring * ulysses, (ring + 1) * ulysses)
        held = [ContextSplit(rings * ulysses, rank).positions(num_tokens)[None] for rank in ranks]
        assert torch.equal(unshard(held)[0], ContextSplit(rings, ring).positions(num_tokens))


def shifted(tokens_BT, starts_BT):
    """The next token where it belongs to the same document."""
    labels = torch.full_like(tokens_BT, -100)
    same = starts_BT[:, 1:] == starts_BT[:, :-1]
    labels[:, :-1][same] = tokens_BT[:, 1:][same]
    return labels


def batch():
    tokens = torch.arange(100, 124)[None].repeat(2, 1)
    starts = torch.tensor([[0] * 24, [0] * 5 + [5] * 19], dtype=torch.int32)
    return Batch(tokens, shifted(tokens, starts), starts)


def labels_that_count(parts):
    return sorted(int(label) for part in parts for label in part.labels_BT.flatten() if label >= 0)


def test_a_sharded_batch_keeps_every_label_that_counts():
    whole = batch()
    parts = [ContextSplit(4, rank).shard_batch(whole) for rank in range(4)]
    assert labels_that_count(parts) == labels_that_count([whole])
    for part in parts:
        counted = part.labels_BT != -100
        assert torch.equal(part.labels_BT[counted], part.tokens_BT[counted] + 1)
    assert torch.equal(unshard([part.starts_BT for part in parts]), whole.starts_BT)


def test_labels_shifted_after_the_split_would_be_missed():
    """The fault that the test before catches."""
    whole = batch()
    parts = [ContextSplit(4, rank).shard_batch(whole) for rank in range(4)]
    late = [Batch(part.tokens_BT, shifted(part.tokens_BT, part.starts_BT), part.starts_BT) for part in parts]
    assert labels_that_count(late) != labels_that_count([whole])


def test_a_batch_without_documents_stays_without():
    whole = batch()
    assert ContextSplit(2, 0).shard_batch(Batch(whole.tokens_BT, whole.labels_BT, None)).starts_BT is None


def test_a_length_that_does_not_split_says_which_would():
    with pytest.raises(DrumlineError, match=r"1,026 tokens cannot be cut into 2 x cp = 8.*\n.*1,024 or 1,032"):
        ContextSplit(4, 0).shard(torch.zeros(1, 1026))


def test_a_rank_outside_of_the_split_is_refused():
    with pytest.raises(ValueError, match="rank 4 is not one of 4"):
        ContextSplit(4, 4)
