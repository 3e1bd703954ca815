"""Sums over ranks in the order of a fixed tree, with the bytes of a ring.

Every rank owns some leaves of the tree and has summed the largest nodes inside them (`numerics.tree.cover`). A tensor
is cut into a piece a rank; all pieces go to their ranks at once, and each rank joins the nodes of its piece:

    reduce-scatter   (n - 1) / n of the tensor sent by each of n ranks, once for each node that it has
    all-reduce       that, and (n - 1) / n for the all-gather of the pieces

With as many leaves for each rank as a power of two, a rank has one node, and the bytes are those of a ring. Where ranks
own unequal runs, such as 3 + 3 + 2 of 8 leaves, some have two nodes.
Source of the exchange: Thakur et al. 2005, IJHPCA 19(1), section 4.3, the pairwise reduce-scatter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from drumline.numerics.tree import Node, cover, tree_sum


@dataclass(frozen=True)
class Owners:
    """Which rank of a group owns which leaves.

    Attributes:
        leaves: of each rank in the group's order; together all leaves, in order.
    """

    leaves: tuple[range, ...]

    @property
    def num_leaves(self) -> int:
        """Of the tree."""
        return self.leaves[-1].stop

    def nodes(self, rank: int) -> list[Node]:
        """What a rank of the group sends."""
        return cover(self.leaves[rank], self.num_leaves)


def tree_reduce_scatter(
    parts: Sequence[torch.Tensor], sizes: Sequence[int], owners: Owners, group: dist.ProcessGroup
) -> torch.Tensor:
    """Sums over a group and leaves each rank its piece.

    Args:
        parts: [N] for each of this rank's nodes, contiguous and of one dtype; N is the sum of `sizes`. They are
            overwritten.
        sizes: elements of the piece of each rank, in the order in which they lie in N; some may be 0.
        owners: of the leaves, for the ranks of the group.
        group: of the ranks.

    Returns:
        This rank's piece of the sum; it may be a view into `parts`.
    """
    rank = dist.get_rank(group)
    pieces = [part.split(list(sizes)) for part in parts]
    coming = {
        node: parts[0].new_empty(sizes[rank]) for other in _others(rank, len(sizes)) for node in owners.nodes(other)
    }
    transfers = []
    for other in _others(rank, len(sizes)):
        transfers += [
            dist.P2POp(dist.irecv, coming[node], group=group, group_peer=other) for node in owners.nodes(other)
        ]
    for other in _others(rank, len(sizes), -1):
        transfers += [dist.P2POp(dist.isend, cut[other], group=group, group_peer=other) for cut in pieces]
    _run(transfers)
    own = {node: cut[rank] for node, cut in zip(owners.nodes(rank), pieces, strict=True)}
    return tree_sum(coming | own, owners.num_leaves)


def tree_all_reduce(parts: Sequence[torch.Tensor], owners: Owners, group: dist.ProcessGroup) -> torch.Tensor:
    """Sums over a group and gives every rank the whole sum, the same bits on each.

    Args:
        parts: [N] for each of this rank's nodes, contiguous and of one dtype. They are overwritten.
        owners: of the leaves, for the ranks of the group.
        group: of the ranks.

    Returns:
        [N], in the memory of the first of `parts`.
    """
    rank, whole = dist.get_rank(group), parts[0]
    sizes = even_pieces(whole.numel(), len(owners.leaves))
    pieces = whole.split(sizes)
    own = pieces[rank].copy_(tree_reduce_scatter(parts, sizes, owners, group))
    gather_pieces(pieces, own, rank, group)
    return whole


def gather_pieces(pieces: Sequence[torch.Tensor], own: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
    """Gives every rank of a group every rank's piece.

    Args:
        pieces: where each rank's piece goes, in the group's order; this rank's is not touched. Sizes may differ.
        own: this rank's piece, contiguous.
        rank: this rank's place in the group.
        group: of the ranks.
    """
    transfers = [
        dist.P2POp(dist.irecv, pieces[other], group=group, group_peer=other) for other in _others(rank, len(pieces))
    ]
    _run(
        [
            *transfers,
            *(dist.P2POp(dist.isend, own, group=group, group_peer=other) for other in _others(rank, len(pieces), -1)),
        ]
    )


def even_pieces(size: int, num_ranks: int) -> list[int]:
    """Sizes of consecutive pieces, of which none has more than one element more than another."""
    return [size // num_ranks + (rank < size % num_ranks) for rank in range(num_ranks)]


def _others(rank: int, num_ranks: int, step: int = 1) -> Iterator[int]:
    """The other ranks, the nearest first, so that at any time every rank is the target of one."""
    return ((rank - step * distance) % num_ranks for distance in range(1, num_ranks))


def _run(transfers: Sequence[dist.P2POp]) -> None:
    # gloo takes no message without bytes for one.
    whole = [transfer for transfer in transfers if transfer.tensor.numel()]
    if whole:
        for work in dist.batch_isend_irecv(whole):
            work.wait()
