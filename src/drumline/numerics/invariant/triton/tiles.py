"""What kernels share: tiles of rows in and out, a sum over lanes, a step of a product.

The sum is a binary tree over lanes, neighbours first, written out in halvings: `tl.sum` adds in the order that the
compiler's layout of registers suggests, and that depends on strides and alignment. Zeros beyond a row's end leave the
tree's result alone.
"""

import triton
import triton.language as tl

# Triton's interpreter multiplies the bit patterns of bf16 tiles; their products are exact in fp32 either way.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_rows(x, row, R, column, D, other):
    """Elements [row, column] of a contiguous [R, D], in fp32; `other` beyond its edges."""
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    return tl.load(x + at, mask=(row < R)[:, None] & (column < D)[None, :], other=other).to(tl.float32)


@triton.jit
def store_rows(x, row, R, column, D, value):
    """Writes elements [row, column] of a contiguous [R, D], rounded to its dtype."""
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=(row < R)[:, None] & (column < D)[None, :])


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The sum of each row of [ROWS, LANES]: neighbours are added, then neighbours of those."""
    for level in tl.static_range(0, 16):
        if (LANES >> level) > 1:
            even, odd = tl.split(tl.reshape(x, (ROWS, LANES >> (level + 1), 2)))
            x = even + odd
    return tl.reshape(x, (ROWS,))


@triton.jit
def product(a, b, total):
    """total + a b, the products summed in fp32 in the order of a tile of this size."""
    if _IS_INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
