"""Cross-entropy of rows of logits with its gradient; a row is summed by lanes and their tree."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumline.numerics.invariant.triton.launch import lanes, launch, num_tiles
from drumline.numerics.invariant.triton.softmax import top_and_total
from drumline.numerics.invariant.triton.tiles import load_rows, store_rows

_ROWS = 4


def cross_entropy(logits_NV: Tensor, labels_N: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """The loss of each row in fp32, and its gradient in the logits' dtype; labels are `ignored` or in [0, V)."""
    logits, labels = logits_NV.contiguous(), labels_N.contiguous()
    losses, gradient = logits.new_empty(labels.shape, dtype=torch.float32), torch.empty_like(logits)
    R, V = logits.shape
    tile = {"ROWS": _ROWS, "LANES": lanes(V)}
    launch(_cross_entropy, num_tiles(R, _ROWS), logits, labels, losses, gradient, R, V, ignored, **tile)
    return losses, gradient


@triton.jit(do_not_specialize=["R", "ignored"])
def _cross_entropy(logits, labels, losses, gradient, R, V, ignored, ROWS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    label = tl.load(labels + row, mask=row < R, other=ignored)
    counts = label != ignored
    top, total = top_and_total(logits, row, R, V, ROWS, LANES)
    total = tl.where(row < R, total, 1.0)
    of_label = tl.load(logits + row.to(tl.int64) * V + label, mask=counts & (row < R), other=0.0).to(tl.float32)
    loss = tl.where(counts, tl.log(total) + (top - of_label), 0.0)
    tl.store(losses + row, loss, mask=row < R)
    for first in range(0, V, LANES):
        column = first + tl.arange(0, LANES)
        shifted = load_rows(logits, row, R, column, V, 0.0) - top[:, None]
        value = tl.div_rn(tl.exp(shifted), tl.broadcast_to(total[:, None], (ROWS, LANES)))
        value -= (column[None, :] == label[:, None]).to(tl.float32)
        store_rows(gradient, row, R, column, V, tl.where(counts[:, None], value, 0.0))
