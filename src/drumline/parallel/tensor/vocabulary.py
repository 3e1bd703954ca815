"""The vocabulary shared out over ranks: rows of the embedding, and the loss of logits of which each rank has some.

    loss = log sum over ranks of sum_v exp(l_v - m)  +  m  -  l_label,     m: the greatest over all ranks

A rank reduces three numbers a token; logits are never gathered. Where the vocabulary does not divide, the last rows of
the last ranks are padding: no token finds them, and their logits count for nothing.
Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.

B sequences, T tokens, D model width, V rows of this rank, C tokens of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from drumline.models.loss import IGNORED
from drumline.parallel.tensor.collectives import Ranks, gather_columns, reduced
from drumline.parallel.tensor.tokens import Tokens


@dataclass(frozen=True)
class VocabularyShare:
    """The rows that a rank holds.

    Attributes:
        offset: the first.
        num_rows: how many, with padding.
        num_tokens: of the whole vocabulary.
    """

    offset: int
    num_rows: int
    num_tokens: int

    @property
    def num_held(self) -> int:
        """How many of the rows are no padding."""
        return max(0, min(self.num_rows, self.num_tokens - self.offset))

    def find(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where tokens lie here.

        Args:
            tokens: int64; what is no token lies nowhere.

        Returns:
            The row of each token, 0 for what does not lie here, and whether it does.
        """
        rows = tokens - self.offset
        is_here = (rows >= 0) & (rows < self.num_held)
        return rows.masked_fill(~is_here, 0), is_here


class SharedRows:
    """The forward of an embedding of which this rank holds some rows.

    Args:
        lookup: the embedding's own.
        share: the rows.
        leave: sums over ranks, of which one has a token's row and the others 0.
    """

    def __init__(
        self,
        lookup: Callable[[torch.Tensor], torch.Tensor],
        share: VocabularyShare,
        leave: Callable[[torch.Tensor], torch.Tensor],
    ):
        self._lookup = lookup
        self._share = share
        self._leave = leave

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        rows_BT, is_here_BT = self._share.find(input)
        return self._leave(self._lookup(rows_BT).masked_fill(~is_here_BT[..., None], 0.0))


class SharedOutput:
    """The forward of an output projection of which this rank holds some rows.

    Args:
        forward: the projection's own, whose cross-entropy knows of the share.
        tokens: how hidden states enter.
        ranks: of the group.
        num_tokens: of the whole vocabulary.
    """

    def __init__(self, forward: Callable[..., torch.Tensor], tokens: Tokens, ranks: Ranks, num_tokens: int):
        self._forward = forward
        self._tokens = tokens
        self._ranks = ranks
        self._num_tokens = num_tokens

    def __call__(
        self, x_BTD: torch.Tensor, labels_BT: torch.Tensor | None, shared_weight_VD: torch.Tensor | None
    ) -> torch.Tensor:
        found = self._forward(self._tokens.enter(x_BTD), labels_BT, shared_weight_VD)
        return found if labels_BT is not None else gather_columns(found, self._ranks)[..., : self._num_tokens]


class LossOfShare:
    """The loss of a chunk whose logits are spread, and the gradient of this rank's.

    Args:
        share: the rows that the logits are of.
        ranks: of the group.
    """

    def __init__(self, share: VocabularyShare, ranks: Ranks):
        self._share = share
        self._ranks = ranks

    def __call__(
        self, logits_CV: torch.Tensor, labels_C: torch.Tensor, wants_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `drumline.models.loss.OfLogits`."""
        wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        wide_CV[:, self._share.num_held :] = float("-inf")
        rows_C, is_here_C = self._share.find(labels_C)
        label_C = wide_CV.gather(1, rows_C[:, None])[:, 0].masked_fill(~is_here_C, 0.0)
        greatest_C = reduced(wide_CV.amax(1), self._ranks, "max")
        exp_CV = wide_CV.sub_(greatest_C[:, None]).exp_()
        label_C, sum_C = reduced(torch.stack([label_C, exp_CV.sum(1)]), self._ranks)
        loss = ((sum_C.log() + greatest_C - label_C) * (labels_C != IGNORED)).sum()
        if not wants_gradient:
            return loss, exp_CV
        grad_CV = exp_CV.div_(sum_C[:, None])
        grad_CV.scatter_add_(1, rows_C[:, None], -is_here_C[:, None].to(grad_CV.dtype))
        return loss, grad_CV.to(logits_CV.dtype)
