"""Rows are cut from documents laid end to end; labels and starts know where a document ends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.texts import ListSource

from drumline.data.batch import IGNORED
from drumline.data.corpus import Corpus
from drumline.data.prepare import prepare
from drumline.data.stream import Stream, validation_documents
from drumline.recipe.errors import DrumlineError

EOS = 256


def test_rows_of_three_short_documents_are_as_written_down_by_hand(make_corpus):
    rows = Stream(make_corpus(["abc", "d", "ef"])).rows(np.array([0, 1]), 4)
    a, b, c, d, e, f = b"abcdef"
    assert rows.tokens_BT.tolist() == [[a, b, c, EOS], [d, EOS, e, f]]
    assert rows.labels_BT.tolist() == [[b, c, EOS, IGNORED], [EOS, IGNORED, f, EOS]]
    assert rows.starts_BT.tolist() == [[0, 0, 0, 0], [0, 0, 2, 2]]


def test_a_document_that_crosses_a_row_starts_at_the_rows_begin(make_corpus):
    rows = Stream(make_corpus(["abcdefgh", "xyz"])).rows(np.array([1]), 6)
    assert rows.starts_BT.tolist() == [[0, 0, 0, 3, 3, 3]]


def test_a_row_past_the_end_is_padding_that_no_label_counts(make_corpus):
    stream = Stream(make_corpus(["abc", "d"]))  # 6 tokens: 5 labels
    rows = stream.rows(np.array([1, 2]), 4)
    assert rows.tokens_BT.tolist() == [[ord("d"), EOS, EOS, EOS], [EOS] * 4]
    assert rows.labels_BT.tolist() == [[EOS, IGNORED, IGNORED, IGNORED], [IGNORED] * 4]
    assert stream.num_rows(4) == 1
    assert stream.num_rows(4, keep_last=True) == 2


def reference_rows(documents, chosen, seq_len):
    """Packs token by token, with lists."""
    tokens, document = [], []
    for number, text in enumerate(documents):
        if chosen[number]:
            tokens += [*text.encode(), EOS]
            document += [number] * (len(text.encode()) + 1)
    rows = []
    for begin in range(0, len(tokens) - seq_len, seq_len):
        inside = range(begin, begin + seq_len)
        labels = [tokens[i + 1] if document[i + 1] == document[i] else IGNORED for i in inside]
        starts = [max(begin, document.index(document[i])) - begin for i in inside]
        rows.append((tokens[begin : begin + seq_len], labels, starts))
    return rows


@settings(max_examples=60)
@given(
    documents=st.lists(st.text("abcde\n", min_size=1, max_size=30).filter(str.strip), min_size=2, max_size=20),
    seq_len=st.integers(1, 17),
    shard_tokens=st.sampled_from([1, 20, 10**6]),
    chosen=st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_packing_equals_a_token_by_token_reference(tmp_path_factory, documents, seq_len, shard_tokens, chosen):
    folder = tmp_path_factory.mktemp("corpus") / "folder"
    prepare(ListSource(documents), folder, tokenizer="bytes", shard_tokens=shard_tokens)
    stream = Stream(Corpus(folder), np.array(chosen[: len(documents)]))
    expected = reference_rows(documents, chosen, seq_len)
    rows = stream.rows(np.arange(stream.num_rows(seq_len)), seq_len)
    found = list(zip(rows.tokens_BT.tolist(), rows.labels_BT.tolist(), rows.starts_BT.tolist(), strict=True))
    assert found == expected


def test_a_larger_validation_fraction_only_adds_documents():
    small, large = validation_documents(5000, 0.01), validation_documents(5000, 0.1)
    assert (large | small).tolist() == large.tolist()
    assert 30 <= small.sum() <= 75
    assert 430 <= large.sum() <= 570


def test_a_document_keeps_its_split_when_documents_are_appended():
    assert validation_documents(2000, 0.05).tolist() == validation_documents(3000, 0.05)[:2000].tolist()


@pytest.mark.parametrize("fraction", [1e-9, 0.01, 0.5, 0.999999, 1.0])
def test_two_documents_give_each_split_one(fraction):
    assert validation_documents(2, fraction).sum() == 1


def test_no_fraction_keeps_no_document_for_validation():
    assert not validation_documents(1000, 0.0).any()


def test_the_two_splits_share_no_document_and_lose_none(make_corpus):
    corpus = make_corpus([f"document {number}" for number in range(200)])
    chosen = validation_documents(200, 0.2)
    train, validation = Stream(corpus, ~chosen), Stream(corpus, chosen)
    assert train.num_documents + validation.num_documents == 200
    assert train.num_tokens + validation.num_tokens == corpus.manifest.num_tokens


def test_a_token_outside_the_vocabulary_is_reported_with_the_command_that_finds_it(make_folder):
    folder = make_folder(["abcdef"])
    path = folder / "tokens-00000.bin"
    data = bytearray(path.read_bytes())
    data[1] = 0xFF
    path.write_bytes(data)
    with pytest.raises(DrumlineError, match=r"vocabulary has 257: `drumline data verify .*folder` names the damaged"):
        Stream(Corpus(folder)).rows(np.array([0]), 4)
