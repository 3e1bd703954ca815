"""Fixed pieces of operands: chunks of the sequence, blocks of a width.

Which bits a matmul gives depends on its shape, and on some processors on where in memory an operand begins. So in exact
mode every product is of one chunk and one block, both parts of the recipe, and begins at a multiple of a cache line.
Sums over chunks pair chunk c with its mirror image from the other end of the sequence, which is what a rank holds where
context parallelism balances causal attention.

B sequences, T tokens, C chunks, S tokens of a chunk, R = B S rows of a chunk, b blocks, N a width.
"""

from collections.abc import Sequence

import torch

_LINE_BYTES = 64


def chunked(x_BTN: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """[B, T, ...] to [C, R, ...]; a view where B is 1."""
    return x_BTN.unflatten(1, (num_chunks, -1)).movedim(1, 0).flatten(1, 2)


def unchunked(x_CRN: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """[C, R, ...] to [B, T, ...]; a view where B is 1."""
    return x_CRN.unflatten(1, (num_sequences, -1)).movedim(0, 1).flatten(1, 2)


def joined_blocks(x_CbRN: torch.Tensor) -> torch.Tensor:
    """[C, b, R, N] to [C, R, b N]."""
    return x_CbRN.movedim(1, 2).flatten(-2)


def in_blocks(x_CRN: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """[C, R, b N] to contiguous [C, b, R, N]."""
    return x_CRN.unflatten(-1, (num_blocks, -1)).movedim(2, 1).contiguous()


def row_blocks(weights: Sequence[torch.Tensor], num_blocks: int) -> torch.Tensor:
    """Weights of one input, each [b N', K], to [b, N, K]: a block has the rows of every weight's block."""
    cut = [weight.unflatten(0, (num_blocks, -1)) for weight in weights]
    return torch.cat(cut, dim=1) if len(cut) > 1 else cut[0]


def cut_rows(blocks_bNK: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The inverse of `row_blocks`, for weights of `sizes` rows."""
    num_blocks = len(blocks_bNK)
    return [part.flatten(0, 1) for part in blocks_bNK.split([size // num_blocks for size in sizes], dim=1)]


def column_blocks(weight_ON: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """[O, b N] to contiguous [b, O, N]."""
    return weight_ON.unflatten(1, (num_blocks, -1)).movedim(1, 0).contiguous()


def mirrored(chunks: Sequence[int], num_chunks: int) -> list[int]:
    """The order in which the chunks that a rank holds are leaves of a sum.

    Args:
        chunks: their numbers in the whole sequence.
        num_chunks: C of the whole sequence.

    Returns:
        Indices into `chunks`.
    """
    return sorted(range(len(chunks)), key=lambda i: (min(chunks[i], num_chunks - 1 - chunks[i]), chunks[i]))


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy that begins at a cache line."""
    return x if x.data_ptr() % _LINE_BYTES == 0 else x.clone()


def ends_on_lines(x: torch.Tensor) -> bool:
    """Whether what follows such a tensor in memory would begin at a cache line."""
    return x.numel() * x.element_size() % _LINE_BYTES == 0


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are held in: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)
