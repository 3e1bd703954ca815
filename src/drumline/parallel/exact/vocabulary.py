"""The vocabulary in fixed blocks: the embedding, the output projection, and the loss through it.

A block has ceil(V / blocks) rows, so that the last may have some that are no tokens; a rank's weight may lack these
rows or hold zeros there. Ranks exchange three numbers a token and rank for the loss.
The embedding's gradient adds a row's occurrences in the order of the tokens, over whole sequences: context-parallel
ranks gather the gradients of tokens, which are fewer numbers than the rows of the vocabulary.

B sequences, T tokens, C chunks, R rows of a chunk, D model width, V vocabulary, v rows of a block, b blocks of this
rank, N tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from drumline.models.decoder import Output
from drumline.models.layers import Embedding
from drumline.models.loss import IGNORED
from drumline.numerics.exact import (
    LeafSum,
    chunked,
    leaf_sum,
    product,
    spread_product,
    unchunked,
    wide,
)
from drumline.numerics.exact.vocabulary import gradient_, losses, masses, merged
from drumline.parallel.exact.pieces import Pieces, nodes
from drumline.parallel.tensor.collectives import gather_columns, reduced, start_scatter
from drumline.parallel.tensor.vocabulary import VocabularyShare


def share_of(num_tokens: int, pieces: Pieces) -> VocabularyShare:
    """The rows of a vocabulary that a rank's blocks are."""
    num_rows = -(-num_tokens // pieces.num_blocks) * pieces.own_blocks
    rank = 0 if pieces.tensor is None else pieces.tensor.rank
    return VocabularyShare(rank * num_rows, num_rows, num_tokens)


class ExactRows:
    """The forward of an embedding.

    Args:
        embedding: its weight is this rank's rows.
        share: which these are.
        pieces: of this rank.
    """

    def __init__(self, embedding: Embedding, share: VocabularyShare, pieces: Pieces):
        self._embedding = embedding
        self._share = share
        self._pieces = pieces

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        weight_VD, dtype = self._embedding.weight, self._embedding.compute_dtype
        return _Rows.apply(input, weight_VD, dtype, self._share, self._pieces)  # pyright: ignore


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens_BT, weight_VD, dtype, share, pieces):
        ctx.save_for_backward(tokens_BT)
        ctx.share, ctx.pieces, ctx.num_rows = share, pieces, len(weight_VD)
        rows_BT, is_here_BT = share.find(tokens_BT)
        # One rank has a token's row and the others add 0: alone, too, so that -0 becomes 0 wherever it is computed.
        found_BTD = F.embedding(rows_BT, weight_VD).to(dtype).masked_fill_(~is_here_BT[..., None], 0.0).add_(0.0)
        x_CRD = chunked(found_BTD, len(pieces.chunks))
        if pieces.tensor is not None and pieces.shares_tokens:
            x_CRD = start_scatter(x_CRD.unflatten(0, (pieces.tensor.degree, -1)).contiguous(), pieces.tensor)()
        elif pieces.tensor is not None:
            x_CRD = reduced(x_CRD, pieces.tensor)
        return unchunked(x_CRD, len(tokens_BT))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        (tokens_BT,) = ctx.saved_tensors
        pieces = ctx.pieces
        grad_CRD = pieces.enter(chunked(grad_outputs[0], pieces.num_between).contiguous())
        grad_ND = pieces.in_order(grad_CRD).flatten(0, 1)
        tokens_N = pieces.in_order(chunked(tokens_BT, len(pieces.chunks))).flatten()
        rows_N, is_here_N = ctx.share.find(tokens_N)
        grad_weight_VD = torch.ops.aten.embedding_dense_backward(
            grad_ND[is_here_N].to(wide(grad_ND.dtype)), rows_N[is_here_N], ctx.num_rows, -1, False
        )
        return None, grad_weight_VD, None, None, None


class ExactLoss:
    """The loss of hidden states through the output projection, of all of the sequence's tokens on every rank.

    Args:
        share: the rows of the vocabulary that this rank's weight is.
        pieces: of this rank.
    """

    def __init__(self, share: VocabularyShare, pieces: Pieces):
        self._share = share
        self._pieces = pieces

    def __call__(self, hidden_BTD: torch.Tensor, weight_VD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        wants_gradient = torch.is_grad_enabled() and (hidden_BTD.requires_grad or weight_VD.requires_grad)
        return _Loss.apply(hidden_BTD, weight_VD, labels_BT, self._share, self._pieces, wants_gradient)  # pyright: ignore


class ExactOutput:
    """The forward of the output projection: logits, or the loss that its `cross_entropy` makes of [B, T, D].

    Args:
        output: its weight, or the embedding's, is this rank's rows.
        share: which these are.
        pieces: of this rank.
    """

    def __init__(self, output: Output, share: VocabularyShare, pieces: Pieces):
        self._output = output
        self._share = share
        self._pieces = pieces

    def __call__(
        self, x_BTD: torch.Tensor, labels_BT: torch.Tensor | None, shared_weight_VD: torch.Tensor | None
    ) -> torch.Tensor:
        weight_VD = self._output.weight if self._output.weight is not None else shared_weight_VD
        if weight_VD is None:
            raise ValueError("the output shares the embedding's weight, but none was given")
        if labels_BT is None:
            return self._logits(x_BTD, weight_VD)
        return self._output.cross_entropy(x_BTD, weight_VD, labels_BT)

    @torch.no_grad()
    def _logits(self, x_BTD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        pieces = self._pieces
        x_CRD = pieces.enter(chunked(x_BTD, pieces.num_between).contiguous())
        blocks_bvD = _blocks(weight_VD.to(x_BTD.dtype), self._share, pieces)
        found_BTV = unchunked(spread_product(x_CRD, blocks_bvD.flatten(0, 1), pieces.own_blocks), len(x_BTD))
        if pieces.tensor is not None:
            found_BTV = gather_columns(found_BTV, pieces.tensor)
        return found_BTV[..., : self._share.num_tokens]


class _Gradients(NamedTuple):
    x_CRD: torch.Tensor
    weight_VD: torch.Tensor


class _Loss(torch.autograd.Function):
    """Logits of a chunk become its loss and, at once, the gradients: logits of all tokens never exist."""

    @staticmethod
    def forward(ctx, x_BTD, weight_VD, labels_BT, share, pieces, wants_gradient):
        x_CRD = pieces.enter(chunked(x_BTD, pieces.num_between).contiguous())
        labels_CR = chunked(labels_BT, len(pieces.chunks))
        loss, gradients = _loss_and_gradients(x_CRD, weight_VD, labels_CR, share, pieces, wants_gradient)
        if gradients is not None:
            ctx.num_sequences = len(x_BTD)
            grad_x_CRD = pieces.leave(gradients.x_CRD).to(x_BTD.dtype)
            ctx.save_for_backward(grad_x_CRD, pieces.over_chunks(gradients.weight_VD))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_x_CRD, grad_weight_VD = ctx.saved_tensors
        scale = grad_outputs[0]
        return unchunked(grad_x_CRD * scale, ctx.num_sequences), grad_weight_VD * scale, None, None, None, None


def _loss_and_gradients(
    x_CRD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_CR: torch.Tensor,
    share: VocabularyShare,
    pieces: Pieces,
    wants_gradient: bool,
) -> tuple[torch.Tensor, _Gradients | None]:
    """The loss over all chunks; gradients as sums over own blocks and own chunks."""
    dtype, (num_blocks, block_rows) = wide(x_CRD.dtype), (pieces.own_blocks, share.num_rows // pieces.own_blocks)
    blocks = list(_blocks(weight_VD.to(x_CRD.dtype), share, pieces))
    shares = [
        VocabularyShare(share.offset + block * block_rows, block_rows, share.num_tokens) for block in range(num_blocks)
    ]
    chunk_losses = x_CRD.new_empty(len(x_CRD), dtype=dtype)
    grad_x_CRD = torch.empty_like(x_CRD, dtype=dtype) if wants_gradient else None
    sums = [LeafSum(len(x_CRD)) for _ in blocks]
    for chunk in pieces.order:
        x_RD, labels_R = x_CRD[chunk], labels_CR[chunk]
        is_counted_R = labels_R != IGNORED
        found = [each.find(labels_R) for each in shares]
        logits_bRv = [product(x_RD, block_vD) for block_vD in blocks]
        for each, logits_Rv in zip(shares, logits_bRv, strict=True):
            logits_Rv[:, each.num_held :] = float("-inf")
        parts = [masses(logits_Rv, *where) for logits_Rv, where in zip(logits_bRv, found, strict=True)]
        losses_R, lse_R = losses(merged(nodes([merged(parts)], pieces.tensor)))
        chunk_losses[chunk] = losses_R.masked_fill(~is_counted_R, 0.0).sum()
        if grad_x_CRD is None:
            continue
        leaves = []
        for logits_Rv, where, block_vD, total in zip(logits_bRv, found, blocks, sums, strict=True):
            grad_Rv = gradient_(logits_Rv, lse_R, *where).masked_fill_(~is_counted_R[:, None], 0.0).to(x_RD.dtype)
            leaves.append(product(grad_Rv, block_vD.t()))
            total.add(product(grad_Rv.t(), x_RD.t()))
        grad_x_CRD[chunk] = leaf_sum(leaves, num_blocks)
    loss = pieces.all_leaves(chunk_losses)
    if grad_x_CRD is None:
        return loss, None
    grad_weight = torch.cat([total.total() for total in sums])  # pyright: ignore[reportArgumentType]
    return loss, _Gradients(grad_x_CRD, grad_weight[: len(weight_VD)])


def _blocks(weight_VD: torch.Tensor, share: VocabularyShare, pieces: Pieces) -> torch.Tensor:
    """[b, v, D]; rows that are no tokens are zeros."""
    missing = share.num_rows - len(weight_VD)
    padded = F.pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD
    return padded.unflatten(0, (pieces.own_blocks, -1))
