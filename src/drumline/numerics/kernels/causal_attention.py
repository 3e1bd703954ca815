"""Causal attention with RoPE inside on CPU: the operators `drumline::attention` and `drumline::attention_backward`.

out_i = sum_j softmax_j(rope(q_i) . rope(k_j) / sqrt(K)) v_j over starts_i <= j <= i. Tiles lie at multiples of 64
tokens of the row, so the bits of a row do not depend on the batch, on later tokens, or on the number of threads.
Inputs and outputs are fp32 or bf16; everything between is fp32. The C++ is in attention.cpp.

Letters: B sequences, T tokens, H query heads, G key/value heads, K head width, 2 = K / 2 rotary frequencies.
"""

import ctypes
import functools

import torch
from torch import Tensor

from drumline.numerics.kernels.build import KernelError, load
from drumline.numerics.kernels.operators import DTYPES, define

_Strides = ctypes.c_int64 * 3


class _Call(ctypes.Structure):
    """The C++ struct Attention, field for field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "tokens", "first", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("width", "threads", "is_bf16")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((name, _Strides) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "starts", "out", "logsumexp", "workspace", "grad_out")),
        ("grad_out_stride", _Strides),
        *((name, ctypes.c_void_p) for name in ("grad_q", "grad_k", "grad_v")),
    )


def attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, cos_TK2: Tensor, sin_TK2: Tensor, starts_BT: Tensor | None = None
) -> Tensor:
    """Attend causally within documents, rotating queries and keys on the way.

    Args:
        q_BTHK: queries before RoPE, fp32 or bf16; any strides with a contiguous last dim.
        k_BTGK: keys before RoPE; G divides H.
        v_BTGK: values.
        cos_TK2: cosines of position times frequency, fp32, rotate-half convention (Hugging Face's Llama).
        sin_TK2: sines.
        starts_BT: int32, the first token of each token's document within its row; None: one document a row.

    Returns:
        out_BTHK in q's dtype, differentiable in q, k and v.

    Raises:
        ValueError: shapes, dtypes or device do not fit.
        KernelError: the kernel cannot run here; `available()` tells before.
    """
    return _attend(q_BTHK, k_BTGK, v_BTGK, cos_TK2, sin_TK2, starts_BT)


@torch.compiler.allow_in_graph  # dynamo need not look inside: autograd traces it with fake tensors
def _attend(*inputs: Tensor | None) -> Tensor:
    return _Attention.apply(*inputs)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        out, logsumexp = _forward_operator(*inputs)
        ctx.save_for_backward(*inputs, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx, *grad_outputs):
        return *_backward_operator(grad_outputs[0], *ctx.saved_tensors), None, None, None


def forward(
    library: ctypes.CDLL, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the forward of a loaded library.

    Args:
        library: from `build.load`.
        q: [B, N, H, K], queries of the last N of T tokens, and so on as in `attention`.
        k: [B, T, G, K].
        v: [B, T, G, K].
        cos: [T, K / 2].
        sin: [T, K / 2].
        starts: [B, T] int32 or None.

    Returns:
        out [B, N, H, K] in q's dtype and logsumexp [B, H, N] in fp32, natural logarithm of scaled scores.
    """
    call, kept = _describe(q, k, v, cos, sin, starts)
    out = torch.empty(q.shape, dtype=q.dtype)
    logsumexp = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    call.out, call.logsumexp = out.data_ptr(), logsumexp.data_ptr()
    kept.append(_workspace(library, call, is_backward=0))
    if out.numel():
        library.drumline_attention_forward(ctypes.byref(call))
    return out, logsumexp


def backward(
    library: ctypes.CDLL,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward of a loaded library.

    `out` and `logsumexp` may be those over more keys than the ones given (context parallelism): the result is then
    these keys' part of the gradients.

    Args:
        library: from `build.load`.
        grad_out: [B, T, H, K], gradient of out.
        q: as in the forward; the inputs before RoPE.
        k: likewise.
        v: likewise.
        cos: likewise.
        sin: likewise.
        starts: likewise.
        out: the forward's result.
        logsumexp: the forward's result.

    Returns:
        Gradients of q, k and v, contiguous, in their dtypes.
    """
    call, kept = _describe(q, k, v, cos, sin, starts)
    out, logsumexp, grad_out = out.contiguous(), logsumexp.contiguous(), _rows(grad_out.to(q.dtype))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    call.out, call.logsumexp, call.grad_out = out.data_ptr(), logsumexp.data_ptr(), grad_out.data_ptr()
    call.grad_out_stride = grad_out.stride()[:3]
    call.grad_q, call.grad_k, call.grad_v = (x.data_ptr() for x in (dq, dk, dv))
    kept.append(_workspace(library, call, is_backward=1))
    if out.numel():
        library.drumline_attention_backward(ctypes.byref(call))
    return dq, dk, dv


def _workspace(library: ctypes.CDLL, call: _Call, is_backward: int) -> Tensor:
    size = library.drumline_attention_workspace
    size.restype = ctypes.c_int64
    work = torch.empty(size(ctypes.byref(call), is_backward), dtype=torch.uint8)
    call.workspace = work.data_ptr()
    return work


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _describe(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, starts: Tensor | None
) -> tuple[_Call, list[Tensor | None]]:
    """The call's inputs, and the tensors that must live until it returns."""
    B, N, H, K = q.shape
    T, G = k.shape[1:3]
    if N > T or k.shape != (B, T, G, K) or v.shape != k.shape or G == 0 or H % G:
        raise ValueError(f"attention: q {tuple(q.shape)} does not go with k {tuple(k.shape)} and v {tuple(v.shape)}")
    if K % 2 or cos.shape != (T, K // 2) or sin.shape != cos.shape:
        raise ValueError(f"attention: cos {tuple(cos.shape)}, sin {tuple(sin.shape)} must be ({T}, K / 2) for K = {K}")
    dtypes = [x.dtype for x in (q, k, v, cos, sin)]
    if q.dtype not in DTYPES or dtypes != [q.dtype] * 3 + [torch.float32] * 2:
        raise ValueError(f"attention: needs q, k, v alike in fp32 or bf16, and cos, sin in fp32; got {dtypes}")
    q, k, v, cos, sin = _rows(q), _rows(k), _rows(v), cos.contiguous(), sin.contiguous()
    call = _Call(batch=B, tokens=T, first=T - N, heads=H, kv_heads=G, width=K, threads=torch.get_num_threads())
    call.is_bf16 = q.dtype == torch.bfloat16
    call.q, call.k, call.v, call.cos, call.sin = (x.data_ptr() for x in (q, k, v, cos, sin))
    call.q_stride, call.k_stride, call.v_stride = q.stride()[:3], k.stride()[:3], v.stride()[:3]
    if starts is not None:
        if starts.shape != (B, T) or starts.dtype != torch.int32:
            raise ValueError(f"attention: starts must be int32 ({B}, {T}), got {starts.dtype} {tuple(starts.shape)}")
        starts = starts.contiguous()
        call.starts = starts.data_ptr()
    return call, [q, k, v, cos, sin, starts]


def _check(library: ctypes.CDLL) -> None:
    """Compare a fresh build with a dense fp64 computation, so that a miscompiled kernel is never used."""
    B, T, H, G, K = 1, 150, 4, 2, 24
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn((B, T, n, K), generator=generator) for n in (H, G, G, H))
    angle = torch.arange(T)[:, None] * torch.logspace(0, -3, K // 2)
    cos, sin = angle.cos(), angle.sin()
    starts = torch.where(torch.arange(T) < 70, 0, 70).to(torch.int32).expand(B, T)
    out, logsumexp = forward(library, q, k, v, cos, sin, starts)
    grads = backward(library, grad, q, k, v, cos, sin, starts, out, logsumexp)

    with torch.enable_grad():
        q64, k64, v64 = leaves = [x.double().requires_grad_() for x in (q, k, v)]
        expected = dense(q64, k64, v64, cos.double(), sin.double(), starts)
        wanted = torch.autograd.grad(expected, leaves, grad.double())
    for name, got, want in zip(("out", "dq", "dk", "dv"), (out, *grads), (expected.detach(), *wanted), strict=True):
        error = ((got - want).abs().max() / want.abs().max()).item()
        if not error < 1e-5:
            raise KernelError(f"the built attention kernel is wrong here: {name} differs from fp64 by {error:.1e}")


def dense(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, cos_TK2: Tensor, sin_TK2: Tensor, starts_BT: Tensor | None = None
) -> Tensor:
    """The same attention in plain torch, in the inputs' dtype, with all scores in memory: what builds are checked with.

    Args:
        q_BTHK: queries before RoPE.
        k_BTGK: keys before RoPE.
        v_BTGK: values.
        cos_TK2: cosines.
        sin_TK2: sines.
        starts_BT: first token of each token's document, or None.

    Returns:
        out_BTHK.
    """

    def rope(x: Tensor) -> Tensor:
        u, w = x.chunk(2, dim=-1)
        cos, sin = cos_TK2[:, None], sin_TK2[:, None]
        return torch.cat((u * cos - w * sin, w * cos + u * sin), dim=-1)

    T, H, K = q_BTHK.shape[1:]
    group = H // k_BTGK.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (rope(k_BTGK), v_BTGK))
    scores = torch.einsum("bihk,bjhk->bhij", rope(q_BTHK), k) / K**0.5
    position = torch.arange(T)
    allowed = (position <= position[:, None])[None, None]
    if starts_BT is not None:
        allowed = allowed & (starts_BT[:, None, :, None] <= position)
    return torch.einsum("bhij,bjhk->bihk", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)


@functools.cache
def library() -> ctypes.CDLL:
    """The built library; raises KernelError where it cannot be had."""
    return load("attention", check=_check)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? starts"
_forward_operator = define(
    f"attention({_INPUTS}) -> (Tensor, Tensor)",
    lambda *inputs: forward(library(), *inputs),
    lambda q, *_: (_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)),
)
_backward_operator = define(
    f"attention_backward(Tensor grad_out, {_INPUTS}, Tensor out, Tensor logsumexp) -> (Tensor, Tensor, Tensor)",
    lambda *inputs: backward(library(), *inputs),
    lambda _, q, k, v, *__: (_like(q), _like(k), _like(v)),
)
