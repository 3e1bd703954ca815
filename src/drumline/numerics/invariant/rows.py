"""Softmax, log-softmax, sum and mean whose bits depend on the summed elements alone.

A row of the summed dim has one order of additions, fixed by its length: by lanes within pieces of 16,384 elements, then
piece by piece (a sum over rows: blocks of 64 rows, then block by block). Other rows, threads and strides do not matter.
"""

import torch
from torch import Tensor

from drumline.numerics.invariant import plain
from drumline.numerics.invariant.native import as_wide, gpu, library, like, operator
from drumline.numerics.kernels import rows as native


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax over one dim.

    Args:
        x: any shape and float dtype.
        dim: the dim.

    Returns:
        As x, in its dtype, differentiable.
    """
    return _Softmax.apply(x.movedim(dim, -1), False).movedim(-1, dim)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Logarithm of the softmax over one dim.

    Args:
        x: any shape and float dtype.
        dim: the dim.

    Returns:
        As x, in its dtype, differentiable.
    """
    return _Softmax.apply(x.movedim(dim, -1), True).movedim(-1, dim)


def sum(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The sum over one dim, or over all elements, added in fp32 at least.

    Args:
        x: any shape and float dtype.
        dim: the dim; None: all.
        keepdim: leave the summed dim, with size 1.

    Returns:
        The sum in x's dtype, differentiable.
    """
    return _Sum.apply(x, dim, keepdim).to(x.dtype)


def mean(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The mean over one dim, or over all elements: the sum divided by their number, rounded once to x's dtype.

    Args:
        x: any shape and float dtype.
        dim: the dim; None: all.
        keepdim: leave the dim, with size 1.

    Returns:
        The mean in x's dtype, differentiable.
    """
    return (_Sum.apply(x, dim, keepdim) / (x.numel() if dim is None else x.shape[dim])).to(x.dtype)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, is_log):
        y = _softmax(x, is_log)
        ctx.save_for_backward(y)
        ctx.is_log = is_log
        return y

    @staticmethod
    def backward(ctx, *grad_outputs):
        return _softmax_backward(grad_outputs[0], *ctx.saved_tensors, ctx.is_log), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, keepdim):
        ctx.shape, ctx.dtype, ctx.dim, ctx.keepdim = x.shape, x.dtype, dim, keepdim
        if dim is None:
            total = _sum_rows(x.reshape(-1))
            return total.reshape([1] * x.dim()) if keepdim else total
        is_over_rows = x.dim() > 1 and dim % x.dim() == x.dim() - 2
        total = _sum_columns(x) if is_over_rows else _sum_rows(x.movedim(dim, -1))
        return total.unsqueeze(dim) if keepdim else total

    @staticmethod
    def backward(ctx, *grad_outputs):
        grad = grad_outputs[0]
        if ctx.dim is not None and not ctx.keepdim:
            grad = grad.unsqueeze(ctx.dim)
        return grad.to(ctx.dtype).expand(ctx.shape), None, None


def _run_softmax(x: Tensor, is_log: bool) -> Tensor:
    if kernels := gpu("softmax", x):
        return kernels.softmax(x, is_log)
    built = library(native, x)
    return plain.softmax(x, is_log).contiguous() if built is None else native.softmax(built, x, is_log)


def _run_softmax_backward(grad: Tensor, y: Tensor, is_log: bool) -> Tensor:
    if kernels := gpu("softmax", grad, y):
        return kernels.softmax_backward(grad, y, is_log)
    built = library(native, grad, y)
    if built is None or grad.dtype != y.dtype:
        return plain.softmax_backward(grad, y, is_log).contiguous()
    return native.softmax_backward(built, grad, y, is_log)


def _run_sum_rows(x: Tensor) -> Tensor:
    if kernels := gpu("sums", x):
        return kernels.sum_rows(x)
    built = library(native, x)
    return plain.tree_sum(x) if built is None else native.sum_rows(built, x)


def _run_sum_columns(x: Tensor) -> Tensor:
    if kernels := gpu("sums", x):
        return kernels.sum_columns(x)
    built = library(native, x)
    return plain.tree_sum(x.transpose(-1, -2)) if built is None else native.sum_columns(built, x)


_softmax = operator("invariant_softmax(Tensor x, bool is_log) -> Tensor", _run_softmax, lambda x, _: like(x))
_softmax_backward = operator(
    "invariant_softmax_backward(Tensor grad, Tensor y, bool is_log) -> Tensor",
    _run_softmax_backward,
    lambda _, y, __: like(y),
)
_sum_rows = operator("invariant_sum(Tensor x) -> Tensor", _run_sum_rows, lambda x: as_wide(x, x.shape[:-1]))
_sum_columns = operator(
    "invariant_sum_of_rows(Tensor x) -> Tensor",
    _run_sum_columns,
    lambda x: as_wide(x, (*x.shape[:-2], x.shape[-1])),
)
