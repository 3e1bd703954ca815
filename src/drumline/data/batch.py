"""What a model is fed: token rows, the labels that are one token on, and where each token's document starts.

Letters: B rows, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # torch costs a second to import, and preparing data needs none of it
    from torch import Tensor

IGNORED = -100  # torch's own ignore_index


class Ahead(NamedTuple):
    """What a module of multi-token prediction is fed: for depth k, at each place the token that is k places further on.

    Attributes:
        tokens_BT: int64; also where that token belongs to another document or to none.
        labels_BT: int64, the token after that; -100 where it belongs to another document than the place itself.
    """

    tokens_BT: "Tensor"
    labels_BT: "Tensor"


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        tokens_BT: int64 token numbers.
        labels_BT: int64, the next token; -100 where the next token belongs to another document.
        starts_BT: int32, for each token the place in its row of its document's first token: token i may attend to j iff
            starts[i] <= j <= i. None: plain causal attention.
        ahead: depth 1, 2, ... of multi-token prediction; empty where the model has none.
        places_BT: int64, for each token its number among all that the run may read: global sample x T + position. What
            dropout is a function of. None: nobody drops anything.
    """

    tokens_BT: "Tensor"
    labels_BT: "Tensor"
    starts_BT: "Tensor | None"
    ahead: tuple[Ahead, ...] = ()
    places_BT: "Tensor | None" = None

    @property
    def num_tokens(self) -> int:
        """Number of labels that count in the loss."""
        return int((self.labels_BT != IGNORED).sum())

    def map(self, function: "Callable[[Tensor], Tensor]") -> "Batch":
        """The batch with a function of each of its tensors."""
        starts_BT = None if self.starts_BT is None else function(self.starts_BT)
        ahead = tuple(Ahead(function(further.tokens_BT), function(further.labels_BT)) for further in self.ahead)
        places_BT = None if self.places_BT is None else function(self.places_BT)
        return Batch(function(self.tokens_BT), function(self.labels_BT), starts_BT, ahead, places_BT)
