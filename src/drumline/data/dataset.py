"""The samples of a run: which tokens stand at a global sample index, as a pure function of (recipe, seed, index).

    index --mixture--> (source, number) --(epoch, place)--> keyed permutation --> row of the source's stream --> tokens

Nothing here has a state: a position in the data is one integer, and any rank can compute any sample.
Letters: B rows, T tokens, S sources.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from drumline.data import stdlib
from drumline.data.corpus import Corpus
from drumline.data.digest import digest_of
from drumline.data.mixture import Mixture, refuse_joined
from drumline.data.order import Permutation
from drumline.data.stream import Rows, Stream, validation_documents
from drumline.data.tokenizer import Tokenizer
from drumline.recipe.errors import DrumlineError
from drumline.recipe.sections import Data

Split = Literal["train", "validation"]
VALIDATION_SEED = 0  # the same samples are validated on whatever the run's seed, so that runs can be compared
CACHED_PERMUTATIONS = 64


def nobody(message: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class SourceStream:
    """One source of the mixture, in one split.

    Attributes:
        path: as the recipe has it.
        weight: its share, relative to the others.
        corpus: its tokens.
        stream: the documents of the split.
        num_rows: samples in one epoch.
    """

    path: str
    weight: float
    corpus: Corpus
    stream: Stream
    num_rows: int


class Dataset:
    """Samples by global index. Train goes on for ever, epoch after epoch; validation ends.

    Args:
        sources: the mixture; all with the same tokenizer.
        split: train or validation.
        seq_len: tokens T in a sample.
        seed: what the order of samples is keyed by.
        shuffle: visit samples in a keyed permutation; off: in stored order.
        document_mask: give `starts_BT`.
        num_ahead: depths of multi-token prediction that rows have tokens and labels for.
    """

    def __init__(
        self,
        sources: Sequence[SourceStream],
        *,
        split: Split,
        seq_len: int,
        seed: int,
        shuffle: bool = True,
        document_mask: bool = True,
        num_ahead: int = 0,
    ):
        self.sources = tuple(sources)
        self.split: Split = split
        self.seq_len = seq_len
        self.seed = seed
        self.shuffle = shuffle
        self.document_mask = document_mask
        self.num_ahead = num_ahead
        self._mixture = Mixture([source.weight for source in self.sources])
        self._permutation = functools.lru_cache(CACHED_PERMUTATIONS)(self._make_permutation)

    @functools.cached_property
    def num_samples(self) -> int:
        """Samples until the first source begins to repeat."""
        return self._mixture.samples_before([source.num_rows for source in self.sources])

    @property
    def num_rows(self) -> int:
        """Different samples in all sources together."""
        return sum(source.num_rows for source in self.sources)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token number."""
        return self.sources[0].corpus.manifest.tokenizer.vocab_size

    @property
    def eos(self) -> int:
        """The end-of-document token."""
        return self.sources[0].corpus.manifest.tokenizer.eos

    @property
    def repeats(self) -> bool:
        """Whether samples go on past num_samples, in a new order each epoch."""
        return self.split == "train"

    @property
    def digest(self) -> str:
        """Identity of the samples and their order: a run may only be resumed on data of the same digest."""
        parts = [self.split, str(self.seq_len), str(self.seed), str(self.shuffle)]
        for source in self.sources:
            parts += [source.corpus.manifest.digest, str(source.weight), str(source.num_rows)]
        return digest_of(*parts)

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer that all sources share."""
        return self.sources[0].corpus.tokenizer()

    def num_steps(self, global_batch: int) -> int:
        """Returns the steps in one pass: whole global batches in train; in validation the last may be padded."""
        return self.num_samples // global_batch if self.repeats else -(-self.num_samples // global_batch)

    def rows(self, index_B: np.ndarray) -> Rows:
        """Returns the samples at global indices.

        Args:
            index_B: int64 indices >= 0, in any order. In validation one past num_samples gives a row without labels.

        Returns:
            The rows in the order of the indices.

        Raises:
            DrumlineError: a shard is damaged.
        """
        parts: list[tuple[np.ndarray, Rows]] = []
        source_B, number_B = self._mixture.locate(index_B)
        for source in np.unique(source_B):
            at = np.flatnonzero(source_B == source)
            row_B = self._row(int(source), number_B[at], index_B[at])
            parts.append((at, self.sources[source].stream.rows(row_B, self.seq_len, self.num_ahead)))
        return parts[0][1] if len(parts) == 1 else _merged(parts, len(index_B))

    def _row(self, source: int, number_B: np.ndarray, index_B: np.ndarray) -> np.ndarray:
        num_rows = self.sources[source].num_rows
        epoch_B, place_B = np.divmod(number_B, num_rows)
        row_B = place_B.copy()
        if self.shuffle:
            for epoch in np.unique(epoch_B):
                at = epoch_B == epoch
                row_B[at] = self._permutation(source, int(epoch))(place_B[at])
        if not self.repeats:
            row_B[index_B >= self.num_samples] = num_rows  # past the end of the stream
        return row_B

    def _make_permutation(self, source: int, epoch: int) -> Permutation:
        # Keyed by the place in the mixture and not by a path, which differs between machines.
        return Permutation(self.sources[source].num_rows, (self.seed, self.split, source, epoch))


def _merged(parts: Sequence[tuple[np.ndarray, Rows]], num_rows: int) -> Rows:
    """Rows of several sources, each at its places."""

    def merge(arrays: Sequence[np.ndarray]) -> np.ndarray:
        whole = np.empty((num_rows, *arrays[0].shape[1:]), arrays[0].dtype)
        for (at, _), array in zip(parts, arrays, strict=True):
            whole[at] = array
        return whole

    found = [rows for _, rows in parts]
    ahead = tuple(
        (merge([tokens for tokens, _ in depth]), merge([labels for _, labels in depth]))
        for depth in zip(*(rows.ahead for rows in found), strict=True)
    )
    tokens, labels, starts = (
        merge([getattr(rows, name) for rows in found]) for name in ("tokens_BT", "labels_BT", "starts_BT")
    )
    return Rows(tokens, labels, starts, ahead)


def open_dataset(
    data: Data, seed: int, split: Split = "train", *, num_ahead: int = 0, notify: Callable[[str], None] = nobody
) -> Dataset:
    """Opens the sources of a recipe's mixture.

    The built-in source is prepared where it is not in the cache yet; any number of processes may ask at once.

    Args:
        data: the recipe's section.
        seed: the run's seed; the order of training samples depends on it, validation does not.
        split: train or validation.
        num_ahead: depths of multi-token prediction that rows have tokens and labels for.
        notify: called with a line for the user where something takes time.

    Returns:
        The dataset of the split.

    Raises:
        DrumlineError: a source is missing, foreign, damaged or too small, or the sources' tokenizers differ.
    """
    corpora = [
        stdlib.cached(data.cache_dir, data.tokenizer, notify)
        if source.path == stdlib.NAME
        else _open_folder(source.path, data)
        for source in data.sources
    ]
    _check_one_tokenizer(data, corpora)
    opened = []
    for source, corpus in zip(data.sources, corpora, strict=True):
        stream = _split(corpus, data.validation_fraction, split)
        num_rows = stream.num_rows(data.seq_len, keep_last=split == "validation")
        if num_rows < 1:
            raise DrumlineError(_too_small(source.path, stream, data, split))
        opened.append(SourceStream(source.path, source.weight, corpus, stream, num_rows))
    return Dataset(
        opened,
        split=split,
        seq_len=data.seq_len,
        seed=seed if split == "train" else VALIDATION_SEED,
        shuffle=data.shuffle,
        document_mask=data.document_mask,
        num_ahead=num_ahead,
    )


def check_vocabulary(dataset: Dataset, vocab_size: int) -> None:
    """Refuses data whose tokens the model has no embedding for.

    Args:
        dataset: what the model is trained on.
        vocab_size: model.vocab_size.

    Raises:
        DrumlineError: the data's vocabulary is larger.
    """
    if dataset.vocab_size > vocab_size:
        raise DrumlineError(
            f"model.vocab_size = {vocab_size:,} is smaller than the data's vocabulary of {dataset.vocab_size:,} tokens "
            f"({dataset.sources[0].path}, tokenizer {dataset.sources[0].corpus.manifest.tokenizer.spec})\n"
            f"  try: model.vocab_size={-(-dataset.vocab_size // 128) * 128}"
        )


def _open_folder(path: str, data: Data) -> Corpus:
    refuse_joined(path)
    corpus = Corpus(Path(path).expanduser())
    corpus.check_tokens()
    made_by = corpus.manifest.tokenizer.spec
    if data.tokenizer not in (made_by, Data.model_fields["tokenizer"].default) and not _is_tokenizer_of(
        data.tokenizer, corpus
    ):
        raise DrumlineError(
            f"data.tokenizer = {data.tokenizer} but {path} was prepared with {made_by}: prepare it again with "
            f"--tokenizer {data.tokenizer}, or leave data.tokenizer out (a prepared folder brings its own)"
        )
    return corpus


def _is_tokenizer_of(spec: str, corpus: Corpus) -> bool:
    path = Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    return path.is_file() and _content(corpus) is not None and path.read_bytes() == _content(corpus)


def _content(corpus: Corpus) -> bytes | None:
    entry = corpus.manifest.tokenizer.file
    return (corpus.folder / entry.name).read_bytes() if entry else None


def _check_one_tokenizer(data: Data, corpora: Sequence[Corpus]) -> None:
    def identity(corpus: Corpus) -> tuple[str, int, int]:
        entry = corpus.manifest.tokenizer
        return entry.file.xxh3_128 if entry.file else "bytes", entry.vocab_size, entry.eos

    for source, corpus in zip(data.sources, corpora, strict=True):
        if identity(corpus) != identity(corpora[0]):
            raise DrumlineError(
                f"the sources have different tokenizers: {data.sources[0].path} ({corpora[0].manifest.tokenizer.spec}) "
                f"and {source.path} ({corpus.manifest.tokenizer.spec})\n  prepare both with one: "
                f"`drumline data prepare ... --tokenizer {corpora[0].folder / 'tokenizer.json'}`"
            )


def _split(corpus: Corpus, wanted_fraction: float, split: Split) -> Stream:
    own = corpus.manifest.validation_fraction
    chosen_N = validation_documents(corpus.num_documents, wanted_fraction if own is None else own)
    if split == "train":
        return Stream(corpus, ~chosen_N if chosen_N.any() else None)
    return Stream(corpus, chosen_N)


def _too_small(path: str, stream: Stream, data: Data, split: Split) -> str:
    if split == "validation":
        return (
            f"{path} has no document for validation: {stream.corpus.num_documents:,} documents in all, "
            f"data.validation_fraction = {data.validation_fraction}\n  prepare it with more and smaller documents "
            "(--documents page, paragraph or line), raise the fraction, or validate never: run.validation_batches=0"
        )
    return (
        f"{path} is too small: its {split} split has {stream.num_tokens:,} tokens in {stream.num_documents:,} "
        f"documents, and one sample takes data.seq_len + 1 = {data.seq_len + 1:,}: "
        "give more text, or a smaller data.seq_len"
    )
