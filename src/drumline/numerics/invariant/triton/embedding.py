"""The gradient of an embedding: a token's occurrences are added in their order, by one program, without atomics."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumline.numerics.invariant.triton.launch import launch, num_tiles

_COLUMNS = 256


def embedding_backward(grad_ND: Tensor, tokens_N: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """The gradient [num_rows, D], summed in fp32 and rounded once to a dtype."""
    grad, width = grad_ND.contiguous(), grad_ND.shape[-1]
    ranked, order = tokens_N.sort(stable=True)
    starts = torch.searchsorted(ranked, torch.arange(num_rows + 1, device=ranked.device))
    out = grad.new_empty((num_rows, width), dtype=dtype)
    num_programs = num_rows * num_tiles(width, _COLUMNS)
    launch(_embedding_backward, num_programs, grad, order, starts, out, width, COLUMNS=_COLUMNS)
    return out


@triton.jit
def _embedding_backward(grad, order, starts, out, D, COLUMNS: tl.constexpr):
    num_tiles = tl.cdiv(D, COLUMNS)
    token = (tl.program_id(0) // num_tiles).to(tl.int64)
    column = tl.program_id(0) % num_tiles * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for place in range(tl.load(starts + token), tl.load(starts + token + 1)):
        at = tl.load(order + place) * D + column
        total += tl.load(grad + at, mask=column < D, other=0.0).to(tl.float32)
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), mask=column < D)
