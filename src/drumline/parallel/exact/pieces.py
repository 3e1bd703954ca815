"""Which of the fixed pieces a rank has, and how pieces and their sums go between ranks.

A tensor-parallel rank has an aligned run of the blocks. A context-parallel rank has two runs of chunks, mirror images
of each other, and with sequence parallelism its tensor-parallel ranks share them out between matmuls. Both own whole
subtrees of the sums over blocks and over mirrored chunks, so that what ranks exchange is one partial sum each.

    all-reduce = scatter (each rank gets a piece of all ranks' partial sums and adds them up the tree) + gather

C chunks, the first dim of what lies here; b blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from drumline.numerics.exact import leaf_sum, mirrored
from drumline.parallel.tensor.collectives import Ranks, start_gather


@dataclass(frozen=True)
class Pieces:
    """The pieces of a rank.

    Attributes:
        num_blocks: of every width, over all ranks.
        num_chunks: of every sequence, over all ranks.
        num_groups: of heads that are computed together, over all ranks.
        tensor: the ranks that share out the blocks; None: this one has all.
        context: the ranks that share out the chunks; None: this one has all.
        both: the ranks along both, context-parallel ones outermost; None: this one is alone.
        shares_tokens: between matmuls, the ranks of `tensor` share out the chunks of a rank of `context`.
    """

    num_blocks: int
    num_chunks: int
    num_groups: int = 1
    tensor: Ranks | None = None
    context: Ranks | None = None
    both: Ranks | None = None
    shares_tokens: bool = False

    @property
    def own_blocks(self) -> int:
        """Blocks that this rank computes with."""
        return self.num_blocks // _degree(self.tensor)

    @property
    def own_groups(self) -> int:
        """Groups of heads that this rank computes with."""
        return self.num_groups // _degree(self.tensor)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Numbers of the chunks that this rank multiplies, ascending."""
        rank = 0 if self.context is None else self.context.rank
        return self.chunks_of(rank)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Numbers of the chunks of a rank of `context`."""
        degree = _degree(self.context)
        run = self.num_chunks // (2 * degree)
        head, tail = rank * run, (2 * degree - 1 - rank) * run
        return *range(head, head + run), *range(tail, tail + run)

    @property
    def order(self) -> list[int]:
        """The order in which `chunks` are leaves of a sum."""
        return mirrored(self.chunks, self.num_chunks)

    @property
    def num_between(self) -> int:
        """Chunks that this rank has between matmuls."""
        return len(self.chunks) // (_degree(self.tensor) if self.shares_tokens else 1)

    def enter(self, x_C: torch.Tensor) -> torch.Tensor:
        """Chunks between matmuls to those that this rank multiplies."""
        return self._gathered(x_C, self.tensor) if self.shares_tokens else x_C

    def leave(self, partial_C: torch.Tensor) -> torch.Tensor:
        """Sums over own blocks of all chunks that are multiplied, to sums over all blocks of those between matmuls."""
        if self.tensor is None:
            return partial_C
        return scattered(partial_C, self.tensor) if self.shares_tokens else summed(partial_C, self.tensor)

    def over_chunks(self, partial: torch.Tensor) -> torch.Tensor:
        """Sums over own chunks, in their order as leaves, to sums over all chunks."""
        return partial if self.context is None else summed(partial, self.context)

    def leaves(self, own_C: torch.Tensor) -> torch.Tensor:
        """The sum of leaves, one for each chunk that this rank has between matmuls.

        Args:
            own_C: [num_between, ...]; few elements each, since all ranks get all of them.

        Returns:
            [...], the sum over all chunks.
        """
        return self._sum(own_C, self.both if self.shares_tokens else self.context)

    def all_leaves(self, own_C: torch.Tensor) -> torch.Tensor:
        """The same of leaves for each chunk that this rank multiplies; all ranks of `tensor` have the same."""
        return self._sum(own_C, self.context)

    def _sum(self, own_C: torch.Tensor, ranks: Ranks | None) -> torch.Tensor:
        leaves = self._gathered(own_C, ranks)
        numbers = [chunk for rank in range(_degree(self.context)) for chunk in self.chunks_of(rank)]
        order = mirrored(numbers, self.num_chunks)
        return leaf_sum((leaves[index].clone() for index in order), len(order))

    def in_order(self, own_C: torch.Tensor) -> torch.Tensor:
        """Chunks that this rank multiplies, to all chunks of the sequence in ascending order."""
        if self.context is None:
            return own_C
        found = self._gathered(own_C, self.context)
        numbers = [chunk for rank in range(self.context.degree) for chunk in self.chunks_of(rank)]
        return found[torch.tensor(numbers).argsort()]

    @staticmethod
    def _gathered(x_C: torch.Tensor, ranks: Ranks | None) -> torch.Tensor:
        return x_C if ranks is None else start_gather(x_C, ranks)().flatten(0, 1)


def scattered(partial: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's part of the sum over ranks, cut along the first dim.

    Args:
        partial: nodes of a tree of which each rank has one, [degree n, ...].
        ranks: a power of two of them.

    Returns:
        [n, ...].
    """
    received = torch.empty_like(partial, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, partial.contiguous(), group=ranks.group)
    return leaf_sum(received.unflatten(0, (ranks.degree, -1)), ranks.degree)


def summed(partial: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum over ranks, on all of them.

    Args:
        partial: a node of a tree of which each rank has one.
        ranks: a power of two of them.

    Returns:
        As partial.
    """
    flat = partial.reshape(-1)
    missing = -flat.numel() % ranks.degree
    padded = torch.cat((flat, flat.new_zeros(missing))) if missing else flat
    whole = start_gather(scattered(padded, ranks), ranks)().flatten()
    return whole[: flat.numel()].view(partial.shape)


def nodes(parts: Sequence[torch.Tensor], ranks: Ranks | None) -> list[torch.Tensor]:
    """All ranks' tensors, in their order, one after the other where a rank has several."""
    if ranks is None:
        return list(parts)
    return list(start_gather(torch.stack(list(parts)), ranks)().flatten(0, 1))


def _degree(ranks: Ranks | None) -> int:
    return 1 if ranks is None else ranks.degree
