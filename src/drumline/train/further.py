"""The loss of tokens further ahead, for the record: summed over micro-batches and ranks, it moves nothing by itself."""

import torch

from drumline.train.routing import SumOverRanks


class FurtherTally:
    """Sums what the modules of multi-token prediction report of a step's micro-batches.

    Args:
        num_modules: of the model, on whatever rank.
        sum_over_ranks: adds the losses of all ranks; once a step, or never for a model without such modules.
        counts: whether this rank is the one that speaks for those that saw the same tokens.
    """

    def __init__(self, num_modules: int, sum_over_ranks: SumOverRanks, *, counts: bool = True):
        self._num_modules = num_modules
        self._sum_over_ranks = sum_over_ranks
        self._speaks = counts
        self._losses: torch.Tensor | None = None

    def add(self, losses_M: torch.Tensor) -> None:
        """Takes the summed losses of one micro-batch, one a module; given to the model's forward."""
        losses_M = losses_M.double() * self._speaks
        self._losses = losses_M if self._losses is None else self._losses + losses_M

    def finish(self, num_tokens: int) -> float | None:
        """Ends a step.

        Args:
            num_tokens: valid next tokens of the global batch.

        Returns:
            The modules' mean loss a valid token, the same on every rank; None where there are none.
        """
        if not self._num_modules:
            return None
        own = torch.zeros(self._num_modules, dtype=torch.float64) if self._losses is None else self._losses
        summed, self._losses = self._sum_over_ranks(own, torch.float64), None
        return float(summed.mean()) / max(1, num_tokens)
