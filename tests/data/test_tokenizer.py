"""Text survives tokenizing, training is repeatable, and special tokens in a text stay text."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.data.tokenizer import ByteTokenizer, bpe_size, load_tokenizer, train_bpe
from drumline.recipe.errors import DrumlineError

TEXTS = ["the cat sat on the mat, and the rat sat on the cat " * 20, "def f(x):\n    return x + 1\n" * 20]
BPE = train_bpe(280, TEXTS)


@settings(max_examples=100)
@given(st.text(max_size=200))
def test_bytes_and_bpe_give_any_text_back(text):
    for tokenizer in (ByteTokenizer(), BPE):
        assert tokenizer.decode(tokenizer.encode([text])[0]) == text


def test_a_byte_is_its_token():
    assert ByteTokenizer().encode(["a\u00e9"])[0].tolist() == [0x61, 0xC3, 0xA9]


def test_training_on_the_same_texts_gives_the_same_tokenizer():
    assert train_bpe(280, TEXTS).to_json() == BPE.to_json()


def test_a_trained_bpe_has_the_size_that_was_asked_for_and_merges_what_is_frequent():
    assert BPE.vocab_size == 280
    assert len(BPE.encode([" the"])[0]) == 1


def test_the_end_of_document_token_in_a_text_is_text():
    tokens = BPE.encode(["a<|end_of_text|>b"])[0]
    assert BPE.eos not in tokens
    assert BPE.decode(tokens) == "a<|end_of_text|>b"


def test_a_stored_tokenizer_loads_as_it_was(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(BPE.to_json())
    loaded = load_tokenizer(str(path))
    assert (loaded.vocab_size, loaded.eos) == (BPE.vocab_size, BPE.eos)
    assert loaded.encode(TEXTS)[0].tolist() == BPE.encode(TEXTS)[0].tolist()
    assert load_tokenizer(str(tmp_path)).to_json() == BPE.to_json()


def test_a_hugging_face_tokenizers_tokens_equal_the_libraries_own(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "hello": 2, "world": 9}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.enable_truncation(2)
    library.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert loaded.encode(["hello big world"])[0].tolist() == [2, 0, 9]  # nothing is truncated
    assert (loaded.vocab_size, loaded.eos) == (10, 1)


@pytest.mark.parametrize("value", ["</s>", {"content": "</s>"}])
def test_the_configured_end_token_wins_over_a_usual_name(tmp_path, value):
    from tokenizers import Tokenizer, models

    vocab = {"<|endoftext|>": 0, "</s>": 1, "x": 2}
    Tokenizer(models.WordLevel(vocab, unk_token="x")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
    assert load_tokenizer(str(tmp_path)).eos == 1
    assert load_tokenizer(str(tmp_path), "x").eos == 2


def test_a_tokenizer_without_an_end_token_asks_for_its_name(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"x": 0}, unk_token="x")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DrumlineError, match="which token ends a document: name it with --eos"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(DrumlineError, match="no token 'nope'"):
        load_tokenizer(str(tmp_path), "nope")


@pytest.mark.parametrize(("spec", "size"), [("bpe:2048", 2048), ("bpe:257", 257), ("bytes", None), ("x/y.json", None)])
def test_a_spec_says_the_size_of_a_bpe(spec, size):
    assert bpe_size(spec) == size


@pytest.mark.parametrize("spec", ["bpe:", "bpe:many", "bpe:256", "bpe:-5", "bpe:\u0663\u0663\u0663"])
def test_a_bpe_of_no_or_too_small_size_is_refused(spec):
    with pytest.raises(DrumlineError, match="a number from 257 up"):
        bpe_size(spec)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(DrumlineError, match=r"no tokenizer 'nowhere.json': use `bytes`"):
        load_tokenizer("nowhere.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DrumlineError, match=r"is not a Hugging Face tokenizer.json"):
        load_tokenizer(str(tmp_path))


def test_token_numbers_of_a_large_vocabulary_do_not_wrap():
    assert BPE.encode(["the"])[0].dtype == np.uint32
