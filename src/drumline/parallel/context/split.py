"""How a sequence lies on the context-parallel ranks: head-tail pairs of chunks, so that causal work is equal.

The sequence is cut into 2n equal chunks for n ranks; rank r holds chunks r and 2n - 1 - r, in this order. Under a
causal mask chunk c sees c + 1/2 chunks, so that every rank computes (r + 1/2) + (2n - 1 - r + 1/2) = 2n of them.
Source: Llama 3, arXiv:2407.21783, section 3.3.2.

B sequences, T tokens (of this rank, or of the whole sequence where said).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drumline.data import Batch
from drumline.recipe.errors import DrumlineError


@dataclass(frozen=True)
class ContextSplit:
    """This rank's place among the ranks that share a sequence.

    Attributes:
        degree: n, how many ranks share a sequence.
        rank: r, this one's number among them.
    """

    degree: int
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.degree:
            raise ValueError(f"rank {self.rank} is not one of {self.degree} ranks")

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers, of 2 x degree, of the two chunks that this rank holds."""
        return self.chunks_of(self.rank)

    def chunks_of(self, rank: int) -> tuple[int, int]:
        """The numbers of the two chunks that a rank of the same split holds, ascending."""
        return rank, 2 * self.degree - 1 - rank

    def positions(self, num_tokens: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The positions in the whole sequence of this rank's tokens, in the order in which it holds them.

        Args:
            num_tokens: of the whole sequence.
            device: of the result.

        Returns:
            int64 [num_tokens / degree], ascending.
        """
        size = chunk_size(num_tokens, self.degree)
        return torch.cat([torch.arange(c * size, (c + 1) * size, device=device) for c in self.chunks])

    def shard(self, whole_BT: torch.Tensor) -> torch.Tensor:
        """This rank's part of a [B, T, ...] tensor of whole sequences."""
        size = chunk_size(whole_BT.shape[1], self.degree)
        return torch.cat([whole_BT[:, c * size : (c + 1) * size] for c in self.chunks], dim=1)

    def shard_batch(self, batch: Batch) -> Batch:
        """This rank's part of a batch.

        Labels come shifted by one token already, so that the label of a chunk's last token, which is the first token
        of a chunk that another rank may hold, goes with it; so do the tokens and labels of every depth ahead. Document
        starts keep naming places in the whole row.

        Args:
            batch: whole rows; the same on every rank of the split.

        Returns:
            [B, T / degree] each.
        """
        return batch.map(self.shard)


def unshard(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins the parts of all ranks, [B, T / degree, ...] in rank order, to the whole [B, T, ...].

    Args:
        parts: as `ContextSplit.shard` made them on ranks 0, 1, ...

    Returns:
        What was sharded.
    """
    heads, tails = zip(*(part.tensor_split(2, dim=1) for part in parts), strict=True)
    return torch.cat([*heads, *reversed(tails)], dim=1)


def chunk_size(num_tokens: int, degree: int) -> int:
    """Tokens of each of the 2 x degree chunks.

    Args:
        num_tokens: of the whole sequence.
        degree: ranks that share it.

    Returns:
        The size.

    Raises:
        DrumlineError: the chunks would not be equal.
    """
    if num_tokens % (2 * degree):
        fitting = num_tokens // (2 * degree) * 2 * degree
        raise DrumlineError(
            f"a sequence of {num_tokens:,} tokens cannot be cut into 2 x cp = {2 * degree} equal chunks"
            f"\n  try: a sequence of {fitting or 2 * degree:,} or {fitting + 2 * degree:,} tokens"
        )
    return num_tokens // (2 * degree)
