"""Products of matrices on CPU whose sums have an order fixed by K alone; the C++ is in matmul.cpp.

    C[m, n] = start[m, n] + sum_k A[m, k] B[n, k]
A sum is one chain of fused multiply-adds, k ascending (bf16 on Intel's matrix units: of steps of 32 products), so an
element's bits depend on its row, its column and `start` alone.
"""

import ctypes
import functools

import torch
from torch import Tensor

from drumline.numerics.kernels.build import KernelError, load
from drumline.numerics.kernels.operators import DTYPES


class _Product(ctypes.Structure):
    """The C++ struct Product, field for field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "is_bf16", "out_is_bf16", "threads")),
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("a_row", "a_k", "b_row", "b_k")),
        *((name, ctypes.c_void_p) for name in ("start", "out", "workspace")),
    )


def matmul(
    library: ctypes.CDLL, a_MK: Tensor, b_NK: Tensor, out_dtype: torch.dtype, start_MN: Tensor | None = None
) -> Tensor:
    """Multiply.

    Args:
        library: from `library()`.
        a_MK: fp32 or bf16, any strides; contiguous along M or K is fast.
        b_NK: of the same dtype, any strides.
        out_dtype: fp32 or bf16.
        start_MN: fp32, what the sums begin with; None: zero.

    Returns:
        [M, N].
    """
    a, b = as_lines(a_MK), as_lines(b_NK)
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty((m, n), dtype=out_dtype)
    if not out.numel():
        return out
    call = _Product(m=m, n=n, k=k, threads=torch.get_num_threads())
    call.is_bf16, call.out_is_bf16 = a.dtype == torch.bfloat16, out_dtype == torch.bfloat16
    call.a, call.b, call.out = a.data_ptr(), b.data_ptr(), out.data_ptr()
    (call.a_row, call.a_k), (call.b_row, call.b_k) = a.stride(), b.stride()
    start = None if start_MN is None else start_MN.contiguous()
    call.start = None if start is None else start.data_ptr()
    work = torch.empty(library.drumline_matmul_workspace(ctypes.byref(call)) + 64, dtype=torch.uint8)
    call.workspace = work.data_ptr() + -work.data_ptr() % 64
    library.drumline_matmul(ctypes.byref(call))
    return out


def as_lines(x: Tensor) -> Tensor:
    """x with one stride of 1."""
    # A dim of size 1 may have any stride, and the kernel takes the one of k for what says how rows lie.
    if x.shape[1] == 1 or x.stride(1) == 1:
        return x if x.stride(1) == 1 else x.as_strided(x.shape, (x.stride(0), 1))
    return x if x.stride(0) == 1 else x.contiguous()


@functools.cache
def library() -> ctypes.CDLL:
    """The built library; raises KernelError where it cannot be had."""
    return _declared(load("matmul", check=_check))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.drumline_matmul_workspace.restype = ctypes.c_int64
    return library


def _check(library: ctypes.CDLL) -> None:
    """Compare a fresh build with torch in fp64, so that a miscompiled kernel is never used."""
    _declared(library)
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for m, n, k in ((3, 70, 45), (70, 3, 45), (47, 83, 600)):
            for a_shape, b_shape in (((m, k), (n, k)), ((k, m), (k, n))):
                a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in (a_shape, b_shape))
                a_MK, b_NK = (a, b) if a_shape == (m, k) else (a.t(), b.t())
                start = torch.randn((m, n), generator=generator)
                want = start.double() + a_MK.double() @ b_NK.double().t()
                got = matmul(library, a_MK, b_NK, torch.float32, start)
                error = ((got - want).abs().max() / want.abs().max()).item()
                if not error < 1e-5:
                    raise KernelError(f"the built kernel of matmul is wrong here: it differs from fp64 by {error:.1e}")
