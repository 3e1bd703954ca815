"""The documents of one split of a corpus, laid end to end as one stream of tokens, and rows cut from it.

Documents stay where they are: the stream is a list of runs of neighbouring documents, and a row is copied from the
one or two runs it lies in. Which split a document belongs to is a keyed hash of its number, so it is the same
whatever the order, world size or seed.
Letters: N documents, R runs, B rows, T tokens.
"""

from dataclasses import dataclass

import numpy as np

from drumline.data.batch import IGNORED
from drumline.data.corpus import Corpus
from drumline.data.order import keyed_hash
from drumline.recipe.errors import DrumlineError


@dataclass(frozen=True)
class Rows:
    """Packed rows: tokens, labels, and where documents start.

    Attributes:
        tokens_BT: int64.
        labels_BT: int64; -100 where the next token belongs to another document, or to none.
        starts_BT: int32, place in the row of the first token of the token's document.
        ahead: for depth 1, 2, ... the tokens that many places further on, int64, and the labels after these; -100 where
            such a label belongs to another document than the place in the row, or to none.
    """

    tokens_BT: np.ndarray
    labels_BT: np.ndarray
    starts_BT: np.ndarray
    ahead: tuple[tuple[np.ndarray, np.ndarray], ...] = ()


def validation_documents(num_documents: int, fraction: float) -> np.ndarray:
    """Says which documents are kept for validation: those whose keyed hash is small.

    A larger fraction adds documents and takes none away. Of two documents or more, neither split is left empty.

    Args:
        num_documents: number of documents N.
        fraction: share of the documents that is wanted, 0 to 1.

    Returns:
        bool (N,).
    """
    hashes_N = keyed_hash(np.arange(num_documents), ("drumline", "validation"))
    if fraction <= 0 or num_documents == 0:
        return np.zeros(num_documents, bool)
    chosen_N = hashes_N < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    if num_documents > 1 and not chosen_N.any():
        chosen_N[np.argmin(hashes_N)] = True
    if num_documents > 1 and chosen_N.all():
        chosen_N[np.argmax(hashes_N)] = False
    return chosen_N


class Stream:
    """Chosen documents of a corpus as one sequence of tokens.

    Args:
        corpus: where the tokens lie.
        chosen_N: bool, which documents belong to the stream; None: all.
    """

    def __init__(self, corpus: Corpus, chosen_N: np.ndarray | None = None):
        self.corpus = corpus
        self._vocab_size = corpus.manifest.tokenizer.vocab_size
        self._eos = corpus.manifest.tokenizer.eos
        lengths_N = corpus.lengths
        shard_N = np.repeat(np.arange(len(corpus.starts)), [len(starts) - 1 for starts in corpus.starts])
        places_N = np.concatenate([starts[:-1] for starts in corpus.starts] or [np.empty(0, np.int64)])
        if chosen_N is not None:
            lengths_N, shard_N, places_N = lengths_N[chosen_N], shard_N[chosen_N], places_N[chosen_N]
        self.num_documents = len(lengths_N)
        self.ends_N = np.cumsum(lengths_N)
        self.num_tokens = int(self.ends_N[-1]) if self.num_documents else 0
        begins_run = np.ones(self.num_documents, bool)
        begins_run[1:] = (places_N[1:] != places_N[:-1] + lengths_N[:-1]) | (shard_N[1:] != shard_N[:-1])
        first_R = np.flatnonzero(begins_run)
        self._run_begin_R = (self.ends_N - lengths_N)[first_R]
        self._run_shard_R = shard_N[first_R]
        self._run_place_R = places_N[first_R]

    def num_rows(self, seq_len: int, *, keep_last: bool = False) -> int:
        """Returns the number of rows of seq_len tokens with labels; keep_last counts a last one that is not full."""
        num_labels = max(0, self.num_tokens - 1)
        return -(-num_labels // seq_len) if keep_last else num_labels // seq_len

    def rows(self, row_B: np.ndarray, seq_len: int, num_ahead: int = 0) -> Rows:
        """Cuts rows out of the stream: row r holds the tokens from r * seq_len on, its labels are one token on.

        Args:
            row_B: int64 row numbers; a row past the end of the stream is padding that no label counts.
            seq_len: tokens T of a row.
            num_ahead: depths of multi-token prediction; what they need beyond the row is read from the stream.

        Returns:
            The rows, in the order of row_B.

        Raises:
            DrumlineError: a token is not in the vocabulary, so the shard is damaged.
        """
        width = seq_len + 1 + num_ahead
        begin_B = row_B * seq_len
        raw = np.full((len(row_B), width), self._eos, dtype=np.int64)
        for out, begin in zip(raw, begin_B.tolist(), strict=True):
            self._copy(begin, out)
        if raw.size and raw.max() >= self._vocab_size:
            raise DrumlineError(
                f"{self.corpus.folder} holds token {raw.max()} but its vocabulary has {self._vocab_size}: "
                f"`drumline data verify {self.corpus.folder}` names the damaged file"
            )
        starts = self._starts(begin_B, width)
        past_B = np.clip(self.num_tokens - begin_B, 0, width)

        def tokens(depth: int) -> np.ndarray:
            return np.ascontiguousarray(raw[:, depth : depth + seq_len])

        def labels(depth: int) -> np.ndarray:
            found = raw[:, depth + 1 : depth + 1 + seq_len].copy()
            found[starts[:, depth + 1 : depth + 1 + seq_len] != starts[:, :seq_len]] = IGNORED
            if past_B.size and past_B.min() < width:
                found[np.arange(depth + 1, depth + 1 + seq_len) >= past_B[:, None]] = IGNORED
            return found

        ahead = tuple((tokens(depth), labels(depth)) for depth in range(1, num_ahead + 1))
        return Rows(tokens(0), labels(0), np.ascontiguousarray(starts[:, :seq_len]), ahead)

    def _copy(self, begin: int, out: np.ndarray) -> None:
        """Copies the tokens from `begin` on into `out`, as far as the stream goes."""
        num_left = min(len(out), self.num_tokens - begin)
        if num_left <= 0:
            return
        done = 0
        run = int(np.searchsorted(self._run_begin_R, begin, side="right")) - 1
        while done < num_left:
            end = int(self._run_begin_R[run + 1]) if run + 1 < len(self._run_begin_R) else self.num_tokens
            count = min(num_left - done, end - begin - done)
            place = int(self._run_place_R[run]) + begin + done - int(self._run_begin_R[run])
            out[done : done + count] = self.corpus.tokens[self._run_shard_R[run]][place : place + count]
            done, run = done + count, run + 1

    def _starts(self, begin_B: np.ndarray, width: int) -> np.ndarray:
        """Returns int32 (B, width): the place in its row of the first token of each token's document."""
        starts = np.zeros((len(begin_B), width), dtype=np.int32)
        first_B = np.searchsorted(self.ends_N, begin_B, side="right")
        last_B = np.searchsorted(self.ends_N, begin_B + width, side="left")
        for row, (first, last, begin) in enumerate(
            zip(first_B.tolist(), last_B.tolist(), begin_B.tolist(), strict=True)
        ):
            places = self.ends_N[first:last] - begin  # where the next document starts
            starts[row, places] = places
        return np.maximum.accumulate(starts, axis=1, out=starts)
