"""Tokens that numerics are tried on: made up, the same on every rank, and awkward on purpose.

Rows differ in what they hold. One in four is a single document; in another, documents end exactly where
context-parallel ranks cut; the others have many short ones. Every row has another number of labels that count, so that
no rank has the same number as the next.

B rows, T tokens.
"""

import numpy as np

from drumline.data.batch import IGNORED
from drumline.data.digest import digest_of
from drumline.data.stream import Rows
from drumline.numerics.random import words
from drumline.recipe.sections import Data, Model

MADE_UP = "made-up"
"""The source of a recipe that means them: `data.sources=made-up`."""

SHORT = 9
"""Mean length of a short document, tokens."""


class MadeUpRows:
    """Samples as `drumline.data.Loader` takes them: a pure function of the index.

    Args:
        vocab_size: tokens are below this, and the last one occurs.
        seq_len: T.
        seed: another seed gives other tokens.
        document_mask: give the starts of documents.
        num_ahead: depths of multi-token prediction.
    """

    repeats = False
    num_rows = 2**31

    def __init__(self, *, vocab_size: int, seq_len: int, seed: int, document_mask: bool, num_ahead: int = 0):
        self.seq_len = seq_len
        self.document_mask = document_mask
        self._vocab_size = vocab_size
        self._seed = seed
        self._num_ahead = num_ahead
        self.digest = digest_of("made up", *map(str, (vocab_size, seq_len, seed, document_mask, num_ahead)))

    def rows(self, index_B: np.ndarray) -> Rows:
        """The rows of these indices."""
        T = self.seq_len
        made = [self._row(int(index)) for index in index_B]
        tokens, starts = (np.stack(parts) for parts in zip(*made, strict=True))
        counts = np.arange(T) >= (T * (index_B % 5) // 7)[:, None]

        def labels(depth: int) -> np.ndarray:
            further = slice(depth + 1, depth + 1 + T)
            is_counted = counts & (starts[:, further] == starts[:, :T])
            return np.where(is_counted, tokens[:, further], IGNORED)

        ahead = tuple((tokens[:, k : k + T].copy(), labels(k)) for k in range(1, self._num_ahead + 1))
        return Rows(tokens[:, :T].copy(), labels(0), starts[:, :T].astype(np.int32), ahead)

    def _row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        T, width = self.seq_len, self.seq_len + 1 + self._num_ahead
        drawn = words(self._seed, "verify/tokens", index * 2 * width, 2 * width).numpy()
        tokens = drawn[:width] % self._vocab_size
        tokens[index % T] = self._vocab_size - 1  # the last row of the vocabulary, which uneven cuts pad
        begins = np.zeros(width, dtype=bool)
        if index % 4 == 1:
            begins[:: max(1, T // 4)] = True
        elif index % 4 >= 2:
            begins = drawn[width:] % SHORT == 0
        begins[0] = True
        return tokens, np.maximum.accumulate(np.where(begins, np.arange(width), 0))


def is_made_up(data: Data) -> bool:
    """Whether a recipe asks for them."""
    return [source.path for source in data.sources] == [MADE_UP]


def made_up(data: Data, seed: int, model: Model) -> MadeUpRows:
    """The samples of a recipe that asks for them."""
    return MadeUpRows(
        vocab_size=model.vocab_size,
        seq_len=data.seq_len,
        seed=seed,
        document_mask=data.document_mask,
        num_ahead=model.num_mtp_layers,
    )
