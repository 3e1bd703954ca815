"""Sums of products of matrices up a binary tree, on CPU; the C++ is in matmul_leaves.h.

    C[m, n] = tree sum over leaves of (sum_s sum_k A_s[m, k] B_s[n, k])
A leaf's products are as in `drumline.numerics.kernels.matmul`: one chain of fused multiply-adds, segment after segment.
The tree adds in fp32. So bits do not depend on which rows and columns of C are computed together.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from drumline.numerics.kernels.matmul import as_lines


class _Segment(ctypes.Structure):
    """The C++ struct Segment, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("k", "a_row", "a_k", "b_row", "b_k")),
    )


class _Leaves(ctypes.Structure):
    """The C++ struct Leaves, field for field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("m", "n", "leaves", "segments", "is_bf16", "out_is_bf16", "threads")),
        *((name, ctypes.c_void_p) for name in ("at", "out", "workspace")),
    )


def matmul_leaves(
    library: ctypes.CDLL, leaves: Sequence[Sequence[tuple[Tensor, Tensor]]], out_dtype: torch.dtype
) -> Tensor:
    """Multiplies and adds.

    Args:
        library: of `drumline.numerics.kernels.matmul`.
        leaves: in the order of the tree; each as many pairs [M, K], [N, K] of one dtype, fp32 or bf16, any strides.
        out_dtype: fp32 or bf16.

    Returns:
        [M, N].
    """
    pairs = [(as_lines(a), as_lines(b)) for leaf in leaves for a, b in leaf]
    (m, n), dtype = (len(side) for side in pairs[0]), pairs[0][0].dtype
    out = torch.empty((m, n), dtype=out_dtype)
    if not out.numel():
        return out
    at = (_Segment * len(pairs))(
        *((a.data_ptr(), b.data_ptr(), a.shape[1], *a.stride(), *b.stride()) for a, b in pairs)
    )
    call = _Leaves(m, n, len(leaves), len(leaves[0]), dtype == torch.bfloat16, out_dtype == torch.bfloat16)
    call.threads, call.at, call.out = torch.get_num_threads(), ctypes.addressof(at), out.data_ptr()
    size = library.drumline_matmul_leaves_workspace
    size.restype = ctypes.c_int64
    work = torch.empty(size(ctypes.byref(call)) + 64, dtype=torch.uint8)
    call.workspace = work.data_ptr() + -work.data_ptr() % 64
    library.drumline_matmul_leaves(ctypes.byref(call))
    return out
