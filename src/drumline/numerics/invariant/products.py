"""Matmul and linear whose bits do not depend on the number of rows, a row's place, chunks or threads, with gradients.

    y[m, n] = sum_k x[m, k] w[n, k]     dx = dy w     dw = dy^T x
Each sum is one chain over k in ascending order, rounded in fp32 at every step, so an element's bits depend on its row
and column alone. A weight's gradient sums over rows; `weight_gradient` goes on with a sum where the last chunk of rows
left off, so that chunks give the bits of the whole: anywhere in fp32; in bf16 where Intel's matrix units are used,
which add 32 products a step, at multiples of 32 rows.
"""

import torch
from torch import Tensor

from drumline.numerics.invariant import plain
from drumline.numerics.invariant.native import gpu, library, operator
from drumline.numerics.kernels import matmul as native


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices, as torch.matmul.

    Args:
        a: [..., M, K], or [K].
        b: [K, N], or [..., K, N] with a's leading dims; of a's dtype.

    Returns:
        [..., M, N] in the inputs' dtype, differentiable in both.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if a.dim() < 1 or b.dim() < 2 or a.shape[-1] != b.shape[-2] or a.dtype != b.dtype:
        raise ValueError(
            f"matmul: {tuple(a.shape)} in {a.dtype} does not go with {tuple(b.shape)} in {b.dtype}: "
            "it takes [..., M, K] and [K, N], or [..., K, N] with the same leading dims, of one dtype"
        )
    if b.dim() == 2:
        return _Matmul.apply(_rows(a), b).view(*a.shape[:-1], b.shape[-1])
    if a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"matmul: the leading dims of {tuple(a.shape)} and {tuple(b.shape)} differ")
    pairs = zip(a.flatten(0, -3).unbind(), b.flatten(0, -3).unbind(), strict=True)
    return torch.stack([_Matmul.apply(x, y) for x, y in pairs]).view(*a.shape[:-1], b.shape[-1])


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """A linear layer; the weight is rounded to x's dtype first, its gradient is summed in fp32 and in its own dtype.

    Args:
        x: [..., K].
        weight_NK: any float dtype.
        bias_N: added last; None: nothing.

    Returns:
        [..., N] in x's dtype, differentiable.

    Raises:
        ValueError: shapes do not fit.
    """
    if weight_NK.dim() != 2 or x.shape[-1] != weight_NK.shape[1]:
        raise ValueError(f"linear: x {tuple(x.shape)} does not go with a weight {tuple(weight_NK.shape)} = [N, K]")
    y = _Linear.apply(_rows(x), weight_NK).view(*x.shape[:-1], weight_NK.shape[0])
    return y if bias_N is None else y + _Bias.apply(bias_N, y.shape[:-1]).to(y.dtype)


def weight_gradient(grad_MN: Tensor, x_MK: Tensor, start_NK: Tensor | None = None) -> Tensor:
    """The gradient of a linear layer's weight, added to that of the rows before.

    Args:
        grad_MN: gradient of the layer's result.
        x_MK: its input, of the same dtype.
        start_NK: the sum so far, in fp32 at least; None: zero.

    Returns:
        start + grad^T x, in fp32 at least: the rows' products are added one after the other.
    """
    return _matmul(grad_MN.t(), x_MK, start_NK, True)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return _matmul(a, b, None, False)

    @staticmethod
    def backward(ctx, *grad_outputs):
        a, b = ctx.saved_tensors
        grad = grad_outputs[0]
        grad_a = _matmul(grad, b.t(), None, False) if ctx.needs_input_grad[0] else None
        grad_b = _matmul(a.t(), grad, None, False) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _matmul(x, weight.to(x.dtype).t(), None, False)

    @staticmethod
    def backward(ctx, *grad_outputs):
        x, weight = ctx.saved_tensors
        grad = grad_outputs[0]
        grad_x = _matmul(grad, weight.to(x.dtype), None, False) if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(grad, x).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


class _Bias(torch.autograd.Function):
    """A bias for every row; its gradient is a sum over rows in their order."""

    @staticmethod
    def forward(ctx, bias, rows):
        ctx.dtype = bias.dtype
        return bias.expand(*rows, -1)

    @staticmethod
    def backward(ctx, *grad_outputs):
        grad = _rows(grad_outputs[0])
        return torch.ops.drumline.invariant_sum_of_rows(grad).to(ctx.dtype), None


def _run(a: Tensor, b: Tensor, start: Tensor | None, is_wide: bool) -> Tensor:
    out_dtype = torch.promote_types(a.dtype, torch.float32) if is_wide else a.dtype
    if kernels := gpu("matmul", a, b):
        return kernels.matmul(a, b, out_dtype, start)
    built = library(native, a, b)
    if built is None:
        return plain.matmul(a, b, start).to(out_dtype)
    return native.matmul(built, a, b.t(), out_dtype, start)


_matmul = operator(
    "invariant_matmul(Tensor a, Tensor b, Tensor? start, bool is_wide) -> Tensor",
    _run,
    lambda a, b, start, is_wide: a.new_empty(
        (a.shape[0], b.shape[1]), dtype=torch.promote_types(a.dtype, torch.float32) if is_wide else a.dtype
    ),
)
