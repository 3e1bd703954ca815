"""Small prepared folders for tests: byte tokens, so that the expected tokens can be written down."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.data.texts import ListSource

from drumline.data.corpus import Corpus
from drumline.data.prepare import prepare


@pytest.fixture
def make_folder(tmp_path):
    """Returns a function that prepares texts into a folder and returns its path."""

    def make(texts: Sequence[str], name: str = "folder", tokenizer: str = "bytes", **options) -> Path:
        prepare(ListSource(texts), tmp_path / name, tokenizer=tokenizer, **options)
        return tmp_path / name

    return make


@pytest.fixture
def make_corpus(make_folder):
    """Returns a function that prepares texts and opens the folder."""

    def make(texts: Sequence[str], **options) -> Corpus:
        return Corpus(make_folder(texts, **options))

    return make
