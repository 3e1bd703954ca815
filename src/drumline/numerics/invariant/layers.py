"""RMSNorm, SwiGLU and embedding whose bits, and whose gradients' bits, do not depend on what surrounds a row.

    RMSNorm:  y = w x / sqrt(mean(x^2) + eps)     SwiGLU:  y = silu(gate) up     embedding:  y_t = W[token_t]
The gradients of weights are sums over rows: RMSNorm's goes by blocks of 64 rows, then block by block; the embedding's
adds the occurrences of a token in their order. So a row's own results depend on that row alone, and a weight's gradient
on the rows in their order, whatever the threads.
"""

import torch
from torch import Tensor

from drumline.numerics.invariant import plain
from drumline.numerics.invariant.native import as_wide, gpu, library, like, operator
from drumline.numerics.kernels import layers as native
from drumline.numerics.kernels import rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim; the weight is rounded to x's dtype first.

    Args:
        x: [..., D], any float dtype.
        weight: [D].
        eps: added to the mean of squares.

    Returns:
        [..., D] in x's dtype, differentiable in x and weight.
    """
    return _RmsNorm.apply(x, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate: any shape and float dtype.
        up: of the same shape and dtype.

    Returns:
        Their combination in the same dtype, differentiable in both.
    """
    return _Swiglu.apply(gate, up)


def embedding(tokens: Tensor, weight_VD: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of a weight; its gradient is summed in fp32 at least.

    Args:
        tokens: int64, any shape, in [0, V).
        weight_VD: any float dtype.
        dtype: of the result; None: the weight's.

    Returns:
        [..., D], differentiable in the weight.
    """
    return _Embedding.apply(tokens, weight_VD, dtype or weight_VD.dtype)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weight, dtype):
        ctx.save_for_backward(tokens)
        ctx.num_rows, ctx.dtype = weight.shape[0], weight.dtype
        return torch.ops.aten.embedding(weight, tokens).to(dtype)

    @staticmethod
    def backward(ctx, *grad_outputs):
        (tokens,) = ctx.saved_tensors
        grad = grad_outputs[0]
        flat = grad.reshape(tokens.numel(), grad.shape[-1])
        return None, _embedding_backward(flat, tokens.reshape(-1), ctx.num_rows, ctx.dtype), None


def _run_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if kernels := gpu("norm", x):
        return kernels.rms_norm(x, weight, eps)
    built = library(native, x)
    if built is not None:
        return native.run_norm(built, x, weight, eps)
    rounded = plain.wide(weight.to(x.dtype))
    y, scale = plain.rms_norm(x.reshape(-1, x.shape[-1]), rounded, eps)
    return y.view(x.shape), scale.view(x.shape[:-1])


def _run_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    if kernels := gpu("norm", grad, x):
        return kernels.rms_norm_backward(grad, x, weight, scale)
    built = library(native, grad, x)
    if built is not None:
        return native.run_norm_backward(built, grad.to(x.dtype), x, weight, scale)
    rounded = plain.wide(weight.to(x.dtype))
    grad_RD, x_RD = (t.reshape(-1, x.shape[-1]) for t in (grad, x))
    grad_x, grad_weight = plain.rms_norm_backward(grad_RD, x_RD, rounded, scale.reshape(-1))
    return grad_x.view(x.shape), grad_weight.to(weight.dtype)


def _run_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if kernels := gpu("swiglu", gate, up):
        return kernels.swiglu(gate, up)
    built = library(native, gate, up)
    return plain.swiglu(gate, up).contiguous() if built is None else native.run_swiglu(built, gate, up)


def _run_swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if kernels := gpu("swiglu", grad, gate, up):
        return kernels.swiglu_backward(grad, gate, up)
    built = library(native, grad, gate, up)
    if built is not None:
        return native.run_swiglu_backward(built, grad.to(gate.dtype), gate, up)
    grad_gate, grad_up = plain.swiglu_backward(grad, gate, up)
    return grad_gate.contiguous(), grad_up.contiguous()


def _run_embedding_backward(grad: Tensor, tokens: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    if kernels := gpu("embedding", grad):
        return kernels.embedding_backward(grad, tokens, num_rows, dtype)
    if dtype != plain.wide(grad).dtype:  # only the rows that tokens name are summed in fp32 and rounded
        present, place = tokens.unique(return_inverse=True)
        sums = _run_embedding_backward(grad, place, len(present), plain.wide(grad).dtype)
        out = torch.zeros((num_rows, grad.shape[-1]), dtype=dtype, device=grad.device)
        out[present] = sums.to(dtype)
        return out
    built = library(rows, grad)
    if built is None:
        return plain.embedding_backward(grad, tokens, num_rows)
    return rows.embedding_backward(built, grad, tokens, num_rows)


_norm = operator(
    "invariant_rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _run_norm,
    lambda x, weight, eps: (like(x), as_wide(x, x.shape[:-1])),
)
_norm_backward = operator(
    "invariant_rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
    _run_norm_backward,
    lambda grad, x, weight, scale: (like(x), torch.empty_like(weight)),
)
_swiglu = operator("invariant_swiglu(Tensor gate, Tensor up) -> Tensor", _run_swiglu, lambda gate, up: like(gate))
_swiglu_backward = operator(
    "invariant_swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    _run_swiglu_backward,
    lambda grad, gate, up: (like(gate), like(up)),
)
_embedding_backward = operator(
    "invariant_embedding_backward(Tensor grad, Tensor tokens, int num_rows, ScalarType dtype) -> Tensor",
    _run_embedding_backward,
    lambda grad, tokens, num_rows, dtype: grad.new_empty((num_rows, grad.shape[-1]), dtype=dtype),
)
_RmsNorm = native.norm_function(_norm, _norm_backward)
_Swiglu = native.swiglu_function(_swiglu, _swiglu_backward)
