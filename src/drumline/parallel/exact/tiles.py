"""Attention of chunks against chunks, each pair in one call, and how results join in the order of the keys.

    out = sum_j w_j out_j / sum_j w_j,   w_j = exp(lse_j - max lse)        j: chunks of keys, ascending

Results of chunks that come early, as in a ring, wait for those before them: the order is the sequence's, not that of
arrival.
Source: as `drumline.parallel.context.partial`.

B sequences, S tokens of a chunk, g groups of heads, H query heads of a group, G key/value heads of a group, K head
width, 2 = keys and values.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from drumline.numerics.exact import aligned, wide
from drumline.parallel.context.partial import Mask, attend_part, attend_part_backward


@dataclass(frozen=True)
class Documents:
    """Where the documents of a rank's queries begin, by chunk.

    Attributes:
        starts: of each chunk, int [B, S], positions in the whole row.
        ranges: of each chunk, the earliest and the latest start.
    """

    starts: tuple[torch.Tensor, ...]
    ranges: tuple[tuple[int, int], ...]


def describe(starts_BT: torch.Tensor, num_chunks: int) -> Documents:
    """Documents of tokens that are `num_chunks` chunks; reads them on the host once."""
    chunks = starts_BT.tensor_split(num_chunks, dim=1)
    ends = torch.stack([torch.stack((part.min(), part.max())) for part in chunks]).tolist()
    return Documents(tuple(chunks), tuple((first, last) for first, last in ends))


@dataclass(frozen=True)
class Tile:
    """Queries of a chunk against keys of a chunk.

    Attributes:
        query: the chunk's number.
        key: likewise.
        mask: [B, S, S]; None: all, up to the diagonal.
    """

    query: int
    key: int
    mask: Mask

    def attend(self, q_gBHSK: torch.Tensor, kv_2gBGSK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The result over these keys, out_gBHSK, and its logsumexp, lse_gBHS."""
        found = []
        for group in zip(q_gBHSK, *kv_2gBGSK, strict=True):
            q, k, v = map(aligned, group)
            found.append(attend_part(q, k, v, self.mask, self.is_causal))
        outs, lses = zip(*found, strict=True)
        return torch.stack(outs), torch.stack(lses)

    def attend_backward(
        self, grad_gBHSK: torch.Tensor, q_gBHSK: torch.Tensor, kv_2gBGSK: torch.Tensor, out: torch.Tensor, lse
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Shares of these keys in the gradients: of the queries, and of the keys and values, in fp32 at least."""
        found = []
        for group in zip(grad_gBHSK, q_gBHSK, *kv_2gBGSK, out, lse, strict=True):
            grad, q, k, v, out_BHSK, lse_BHS = map(aligned, group)
            found.append(attend_part_backward(grad, q, k, v, out_BHSK, lse_BHS, self.mask, self.is_causal))
        grad_q, grad_k, grad_v = (torch.stack(each) for each in zip(*found, strict=True))
        dtype = wide(grad_q.dtype)
        return grad_q.to(dtype), torch.stack((grad_k, grad_v)).to(dtype)

    @property
    def is_causal(self) -> bool:
        """Whether it lies on the diagonal."""
        return self.query == self.key


def tiles_of(query: int, index: int, size: int, documents: Documents | None) -> list[Tile]:
    """What a chunk of queries sees.

    Args:
        query: the chunk's number.
        index: its place among the rank's chunks.
        size: tokens of a chunk.
        documents: of the rank's queries; None: one document.

    Returns:
        The tiles, ascending by key.
    """
    if documents is None:
        return [Tile(query, key, None) for key in range(query + 1)]
    earliest, latest = documents.ranges[index]
    return [
        Tile(query, key, _seen(documents.starts[index], key, size) if latest > key * size else None)
        for key in range(earliest // size, query + 1)
    ]


def _seen(starts_BS: torch.Tensor, key: int, size: int) -> torch.Tensor:
    positions_S = torch.arange(key * size, (key + 1) * size, device=starts_BS.device)
    return positions_S >= starts_BS[:, :, None]


class InOrder:
    """Takes results in any order and hands them on in that of their keys.

    Args:
        keys: of the chunks that will come, ascending.
    """

    def __init__(self, keys: Iterable[int]):
        self._left = list(keys)
        self._early: dict[int, tuple[torch.Tensor, ...]] = {}

    def add(self, key: int, *result: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Takes a result; returns those whose turn has come."""
        self._early[key] = result
        due = []
        while self._left and self._left[0] in self._early:
            due.append(self._early.pop(self._left.pop(0)))
        return due


class Joined:
    """Results over chunks of keys, joined one after the other.

    Args:
        keys: of the chunks that will come, ascending.
    """

    def __init__(self, keys: Iterable[int]):
        self._results = InOrder(keys)
        self._state: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def add(self, key: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Takes the result over a chunk of keys."""
        for part in self._results.add(key, out, lse):
            self._join(*part)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result over all keys and its logsumexp, in fp32 at least."""
        assert self._state is not None, "every token sees itself"
        out, greatest, mass = self._state
        return out.div_(mass[..., None]), mass.log().add_(greatest)

    def _join(self, part: torch.Tensor, part_lse: torch.Tensor) -> None:
        part = part.to(part_lse.dtype)
        if self._state is None:
            # A row that sees nothing here has a logsumexp of -inf.
            self._state = part, part_lse, (part_lse != -math.inf).to(part_lse.dtype)
            return
        out, before, mass = self._state
        greatest = torch.maximum(before, part_lse)
        finite = greatest.masked_fill(greatest == -math.inf, 0.0)
        kept, added = (before - finite).exp_(), (part_lse - finite).exp_()
        out = out.mul_(kept[..., None]).add_(part * added[..., None])
        self._state = out, greatest, mass.mul_(kept).add_(added)
