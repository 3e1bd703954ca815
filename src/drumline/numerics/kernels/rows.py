"""Sums, softmax, log-softmax and the gradient of an embedding on CPU, each with one fixed order of additions.

Functions of fp32 or bf16 tensors; `drumline.numerics.invariant` makes operators of them. The C++ is in rows.cpp.
"""

import ctypes
import functools

import torch
from torch import Tensor

from drumline.numerics.kernels.build import KernelError, load
from drumline.numerics.kernels.operators import mode, pointers, rows_and_width


def softmax(library: ctypes.CDLL, x: Tensor, is_log: bool) -> Tensor:
    """Softmax or log-softmax over the last dim, in x's dtype."""
    x = x.contiguous()
    y = torch.empty_like(x)
    library.drumline_softmax(*pointers(x, y), *rows_and_width(x), int(is_log), *mode(x))
    return y


def softmax_backward(library: ctypes.CDLL, grad: Tensor, y: Tensor, is_log: bool) -> Tensor:
    """The gradient of the input, from that of the result y and y itself."""
    grad, y = grad.contiguous(), y.contiguous()
    grad_x = torch.empty_like(y)
    library.drumline_softmax_backward(*pointers(grad, y, grad_x), *rows_and_width(y), int(is_log), *mode(y))
    return grad_x


def sum_rows(library: ctypes.CDLL, x: Tensor) -> Tensor:
    """The sum over the last dim, fp32: pieces of 16,384 elements, each by lanes, added in order."""
    x = x.contiguous()
    y = torch.empty(x.shape[:-1], dtype=torch.float32)
    sizes = rows_and_width(x)
    partials = torch.empty(library.drumline_sum_partials(*sizes), dtype=torch.float32)
    library.drumline_sum_rows(*pointers(x, y, partials), *sizes, *mode(x))
    return y


def sum_columns(library: ctypes.CDLL, x: Tensor) -> Tensor:
    """The sum over the last dim but one, fp32: blocks of 64 rows, added in order."""
    x = x.contiguous()
    y = torch.empty((*x.shape[:-2], x.shape[-1]), dtype=torch.float32)
    outer = x.shape[:-2].numel()
    sizes = (ctypes.c_int64(n) for n in (outer, x.shape[-2], x.shape[-1]))
    library.drumline_sum_columns(*pointers(x, y), *sizes, *mode(x))
    return y


def embedding_backward(library: ctypes.CDLL, grad: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    """The fp32 gradient [num_rows, D] of an embedding: each row's tokens are added in their order. grad is [N, D]."""
    # Zeros from the system are free until they are touched, and most rows never are.
    grad, tokens = grad.contiguous(), tokens.contiguous()
    width = grad.shape[-1]
    out = torch.zeros((num_rows, width), dtype=torch.float32)
    sizes = (ctypes.c_int64(n) for n in (tokens.numel(), width))
    library.drumline_embedding_backward(*pointers(grad, tokens, out), *sizes, *mode(grad))
    return out


@functools.cache
def library() -> ctypes.CDLL:
    """The built library; raises KernelError where it cannot be had."""
    library = load("rows", check=_check)
    library.drumline_sum_partials.restype = ctypes.c_int64
    return library


def _check(library: ctypes.CDLL) -> None:
    """Compare a fresh build with torch in fp64, so that a miscompiled kernel is never used."""
    library.drumline_sum_partials.restype = ctypes.c_int64
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn((70, 45), generator=generator) for _ in range(2))
    tokens = torch.randint(0, 9, (70,), generator=generator)
    own, wanted = {}, {}
    with torch.enable_grad():
        x64 = x.double().requires_grad_()
        for name, is_log, of in (("softmax", False, torch.softmax), ("log-softmax", True, torch.log_softmax)):
            own[name] = softmax(library, x, is_log)
            wanted[name] = of(x64, -1)
            own[f"{name} dx"] = softmax_backward(library, grad, own[name], is_log)
            wanted[f"{name} dx"] = torch.autograd.grad(wanted[name], x64, grad.double())[0]
    own |= {"sum": sum_rows(library, x), "sum of rows": sum_columns(library, x)}
    wanted |= {"sum": x.double().sum(-1), "sum of rows": x.double().sum(0)}
    own["embedding"] = embedding_backward(library, grad, tokens, 9)
    wanted["embedding"] = torch.zeros((9, 45), dtype=torch.float64).index_add_(0, tokens, grad.double())
    for name, got in own.items():
        error = ((got - wanted[name]).abs().max() / wanted[name].abs().max()).item()
        if not error < 1e-5:
            raise KernelError(f"the built kernels of rows are wrong here: {name} differs from fp64 by {error:.1e}")
