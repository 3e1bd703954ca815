"""Attention over a sequence of fixed chunks, whoever holds them: the same tiles, joined in the same order.

    forward     a chunk of queries joins its results over chunks of keys in ascending order
    backward    the gradient of queries adds up in that order; the gradient of a chunk of keys is a sum over chunks of
                queries up a tree of mirrored chunks: each rank adds its own, and sends a node to the owner of the keys

A gradient of keys that travels round a ring and grows would add up in the order of the ranks.

B sequences, T tokens of this rank, C chunks of this rank, S tokens of a chunk, g groups of heads, H query heads, G
key/value heads (of this rank, or of a group), K head width, 2 = keys and values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from drumline.comm import Passing
from drumline.models.rope import Rope
from drumline.numerics.exact import LeafSum, mirrored, wide
from drumline.parallel.context.position import rotate_local
from drumline.parallel.context.split import ContextSplit
from drumline.parallel.exact.pieces import Pieces, scattered
from drumline.parallel.exact.tiles import Documents, InOrder, Joined, Tile, describe, tiles_of
from drumline.parallel.tensor.collectives import Ranks, start_gather


@dataclass(frozen=True)
class Chunks:
    """The chunks of a sequence, and who holds them.

    Attributes:
        num_chunks: of the whole sequence.
        ranks: that share the sequence; None: this one alone.
        in_ring: keys and values are passed around; else they are gathered.
    """

    num_chunks: int
    ranks: Ranks | None
    in_ring: bool

    @property
    def split(self) -> ContextSplit:
        """This rank's place."""
        return ContextSplit(1, 0) if self.ranks is None else ContextSplit(self.ranks.degree, self.ranks.rank)

    @property
    def pieces(self) -> Pieces:
        """This rank's chunks."""
        return Pieces(self.num_chunks // 2, self.num_chunks, context=self.ranks)

    def others(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """What each rank holds, one after the other as it comes: the rank, and a tensor like `own`."""
        if self.ranks is None:
            yield 0, own
        elif self.in_ring:
            degree, rank = self.ranks.degree, self.ranks.rank
            for step in range(degree):
                passing = Passing(own, degree, rank, self.ranks.group) if step < degree - 1 else None
                yield (rank - step) % degree, own
                if passing is not None:
                    own = passing.wait()
        else:
            yield from enumerate(start_gather(own, self.ranks)())


class ExactAttend:
    """An `Attend` of fixed chunks and fixed groups of heads.

    Args:
        chunks: of the sequence.
        group_width: key/value heads that are computed together.
    """

    def __init__(self, chunks: Chunks, group_width: int):
        self._chunks = chunks
        self._group_width = group_width

    def prepare(self, starts_BT: torch.Tensor, dtype: torch.dtype) -> Documents:
        """Documents of this rank's tokens; starts are positions in the whole row."""
        return describe(starts_BT, len(self._chunks.pieces.chunks))

    def __call__(
        self, q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor, rope: Rope, mask: Documents | None
    ) -> torch.Tensor:
        """As `Attend`, for this rank's tokens; rope holds the tables of the whole sequence."""
        q_BTHK, k_BTGK = (rotate_local(x, rope, self._chunks.split) for x in (q_BTHK, k_BTGK))
        num_groups = k_BTGK.shape[2] // self._group_width
        return _Attend.apply(q_BTHK, k_BTGK, v_BTGK, self._chunks, num_groups, mask)  # pyright: ignore


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BTHK, k_BTGK, v_BTGK, chunks, num_groups, documents):
        own = chunks.pieces.chunks
        q = _cut(q_BTHK, len(own), num_groups)
        kv = torch.stack([_cut(x, len(own), num_groups) for x in (k_BTGK, v_BTGK)], dim=1)
        rows = [tiles_of(chunk, index, q.shape[-2], documents) for index, chunk in enumerate(own)]
        joined = [Joined(tile.key for tile in row) for row in rows]
        for rank, kv_C in chunks.others(kv):
            for index, tile, key in _meetings(rows, chunks.pieces.chunks_of(rank)):
                joined[index].add(tile.key, *tile.attend(q[index], kv_C[key]))
        found = [each.finish() for each in joined]
        out = torch.stack([out.to(q.dtype) for out, _ in found])
        lse = torch.stack([lse for _, lse in found])
        ctx.save_for_backward(q, kv, out, lse)
        ctx.chunks, ctx.rows = chunks, rows
        return _joined(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, kv, out, lse = ctx.saved_tensors
        chunks, rows, dtype = ctx.chunks, ctx.rows, wide(q.dtype)
        # In fp32: torch takes several times as long in bf16, and shares are not rounded before they add up.
        grad = _cut(grad_outputs[0], len(q), q.shape[1]).to(dtype)
        q, out, grad_q = q.to(dtype), out.to(dtype), torch.zeros_like(q, dtype=dtype)
        due = [InOrder(tile.key for tile in row) for row in rows]
        nodes: dict[int, torch.Tensor] = {}
        for rank, kv_C in chunks.others(kv):
            keys, kv_C = chunks.pieces.chunks_of(rank), kv_C.to(dtype)
            found: dict[tuple[int, int], torch.Tensor] = {}
            for index, tile, key in _meetings(rows, keys):
                part = (grad[index], q[index], kv_C[key], out[index], lse[index])
                grad_q_part, found[index, key] = tile.attend_backward(*part)
                for (each,) in due[index].add(tile.key, grad_q_part):
                    grad_q[index] += each
            order = mirrored(chunks.pieces.chunks, chunks.num_chunks)
            nodes[rank] = torch.stack([_node(found, order, key, kv_C[key]) for key in range(len(keys))])
        grad_kv = torch.cat([nodes[rank] for rank in sorted(nodes)])
        if chunks.ranks is not None:
            grad_kv = scattered(grad_kv, chunks.ranks)
        # Chunks that see nothing of each other add nothing on one rank and 0 across ranks: the same but for -0.
        grad_k, grad_v = grad_kv.add_(0.0).to(kv.dtype).unbind(1)
        return _joined(grad_q.to(kv.dtype)), _joined(grad_k), _joined(grad_v), None, None, None


def _meetings(rows: list[list[Tile]], keys: tuple[int, ...]) -> Iterator[tuple[int, Tile, int]]:
    """Tiles of keys that have come: the place of the queries, the tile, and the place of the keys."""
    for index, row in enumerate(rows):
        for tile in row:
            if tile.key in keys:
                yield index, tile, keys.index(tile.key)


def _node(found: dict[tuple[int, int], torch.Tensor], order: list[int], key: int, like: torch.Tensor) -> torch.Tensor:
    total = LeafSum(len(order))
    for index in order:
        total.add(found.get((index, key)))
    node = total.total()
    return torch.zeros_like(like, dtype=wide(like.dtype)) if node is None else node


def _cut(x_BTHK: torch.Tensor, num_chunks: int, num_groups: int) -> torch.Tensor:
    """[B, T, H, K] to contiguous [C, g, B, H, S, K]."""
    return x_BTHK.unflatten(2, (num_groups, -1)).unflatten(1, (num_chunks, -1)).permute(1, 3, 0, 4, 2, 5).contiguous()


def _joined(x_CgBHSK: torch.Tensor) -> torch.Tensor:
    """The inverse of `_cut`."""
    return x_CgBHSK.permute(2, 0, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2)
