"""What a model is fed: token rows, the labels that are one token on, and where each token's document starts.

Letters: B rows, T tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch costs a second to import, and preparing data needs none of it
    from torch import Tensor

IGNORED = -100  # torch's own ignore_index


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        tokens_BT: int64 token numbers.
        labels_BT: int64, the next token; -100 where the next token belongs to another document.
        starts_BT: int32, for each token the place in its row of its document's first token: token i may attend to j iff
            starts[i] <= j <= i. None: plain causal attention.
    """

    tokens_BT: "Tensor"
    labels_BT: "Tensor"
    starts_BT: "Tensor | None"

    @property
    def num_tokens(self) -> int:
        """Number of labels that count in the loss."""
        return int((self.labels_BT != IGNORED).sum())
