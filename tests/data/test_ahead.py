"""Tokens and labels of every depth of multi-token prediction: right at document borders, row ends and after a split."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.texts import ListSource

from drumline.data import Loader, open_dataset
from drumline.data.batch import IGNORED
from drumline.data.corpus import Corpus
from drumline.data.prepare import prepare
from drumline.data.stream import Stream
from drumline.parallel.context import ContextSplit, unshard
from drumline.recipe.sections import Data, Source

EOS = 256
TEXTS = [f"document {number}: " + "la " * (number % 13) + "\n" for number in range(300)]


def test_rows_of_three_short_documents_are_as_written_down_by_hand(make_corpus):
    rows = Stream(make_corpus(["abc", "d", "ef"])).rows(np.array([0, 1]), 4, 2)
    a, b, c, d, e, f = b"abcdef"
    assert rows.tokens_BT.tolist() == [[a, b, c, EOS], [d, EOS, e, f]]
    (one, label_one), (two, label_two) = rows.ahead
    assert one.tolist() == [[b, c, EOS, d], [EOS, e, f, EOS]]
    assert label_one.tolist() == [[c, EOS, IGNORED, IGNORED], [IGNORED, IGNORED, EOS, IGNORED]]
    assert two.tolist() == [[c, EOS, d, EOS], [e, f, EOS, EOS]]
    assert label_two.tolist() == [[EOS, IGNORED, IGNORED, IGNORED], [IGNORED] * 4]


def reference(documents, seq_len, depth):
    """Token by token, with lists."""
    tokens = [token for text in documents for token in (*text.encode(), EOS)]
    document = [number for number, text in enumerate(documents) for _ in range(len(text.encode()) + 1)]
    rows = []
    for begin in range(0, len(tokens) - seq_len, seq_len):
        places = range(begin, begin + seq_len)
        there = [tokens[i + depth] if i + depth < len(tokens) else EOS for i in places]
        after = [i + depth + 1 for i in places]
        labels = [
            tokens[j] if j < len(tokens) and document[j] == document[i] else IGNORED
            for i, j in zip(places, after, strict=True)
        ]
        rows.append((there, labels))
    return rows


@settings(max_examples=60)
@given(
    documents=st.lists(st.text("abcde\n", min_size=1, max_size=12).filter(str.strip), min_size=2, max_size=20),
    seq_len=st.integers(1, 17),
    num_ahead=st.integers(1, 4),
)
def test_every_depth_equals_a_token_by_token_reference(tmp_path_factory, documents, seq_len, num_ahead):
    folder = tmp_path_factory.mktemp("data") / "corpus"
    prepare(ListSource(documents), folder, tokenizer="bytes")
    stream = Stream(Corpus(folder))
    number = np.arange(stream.num_rows(seq_len))
    rows, plain = stream.rows(number, seq_len, num_ahead), stream.rows(number, seq_len)
    for depth in range(1, num_ahead + 1):
        tokens, labels = rows.ahead[depth - 1]
        assert list(zip(tokens.tolist(), labels.tolist(), strict=True)) == reference(documents, seq_len, depth)
    for name in ("tokens_BT", "labels_BT", "starts_BT"):
        assert np.array_equal(getattr(rows, name), getattr(plain, name))
    assert plain.ahead == ()


@pytest.fixture
def mixed(make_folder):
    sources = (
        Source(path=str(make_folder(TEXTS, name="one")), weight=0.7),
        Source(path=str(make_folder([text.upper() for text in TEXTS], name="two")), weight=0.3),
    )
    return Data(sources=sources, seq_len=16, global_batch=8, micro_batch=1)


def batches(data, **options):
    with Loader(open_dataset(data, 0, num_ahead=2), global_batch=8, micro_batch=2, **options) as loader:
        return loader.batches(3)


def is_shifted(batch):
    """Whether each depth's tokens are those of the depth before, one place on; and its labels the tokens after."""
    depths = [batch.tokens_BT, *(further.tokens_BT for further in batch.ahead)]
    labels = [batch.labels_BT, *(further.labels_BT for further in batch.ahead)]
    moved = all(torch.equal(a[:, 1:], b[:, :-1]) for a, b in itertools.pairwise(depths))
    counted = [label != IGNORED for label in labels]
    tokens_after = all(
        torch.equal(label[is_counted], there[is_counted])
        for label, is_counted, there in zip(labels, counted, depths[1:], strict=False)
    )
    fewer = all(bool((a | ~b).all()) for a, b in itertools.pairwise(counted))
    return moved and tokens_after and fewer


def test_depths_of_a_mixture_go_on_within_their_own_source(mixed):
    assert all(is_shifted(batch) and len(batch.ahead) == 2 for batch in batches(mixed))


def test_a_context_split_keeps_every_label_of_every_depth(mixed):
    whole = batches(mixed)
    parts = [batches(mixed, share=ContextSplit(2, rank).shard_batch) for rank in range(2)]
    for index, batch in enumerate(whole):
        for depth in range(2):
            for name in ("tokens_BT", "labels_BT"):
                joined = unshard([getattr(part[index].ahead[depth], name) for part in parts])
                assert torch.equal(joined, getattr(batch.ahead[depth], name))


def test_depths_shifted_after_the_split_would_be_missed(mixed):
    """The fault that the test before catches: a rank's chunks are not neighbours."""
    (batch, *_) = batches(mixed, share=ContextSplit(2, 0).shard_batch)
    late = batch.tokens_BT.roll(-1, 1)
    assert not torch.equal(late[:, :-1], batch.ahead[0].tokens_BT[:, :-1])


def test_another_depth_changes_no_sample_and_no_digest(mixed):
    with_depths, without = open_dataset(mixed, 0, num_ahead=2), open_dataset(mixed, 0)
    assert with_depths.digest == without.digest
    rows = [dataset.rows(np.arange(8)) for dataset in (with_depths, without)]
    assert np.array_equal(rows[0].tokens_BT, rows[1].tokens_BT)
    assert np.array_equal(rows[0].labels_BT, rows[1].labels_BT)
