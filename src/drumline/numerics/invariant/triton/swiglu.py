"""silu(gate) * up and its gradients: element by element, from one form of the exponential."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumline.numerics.invariant.triton.launch import launch, num_tiles

_BLOCK = 1024


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in their dtype."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    launch(_swiglu, num_tiles(y.numel(), _BLOCK), gate, up, y, y.numel(), BLOCK=_BLOCK)
    return y


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    num = gate.numel()
    launch(_swiglu_backward, num_tiles(num, _BLOCK), grad, gate, up, grad_gate, grad_up, num, BLOCK=_BLOCK)
    return grad_gate, grad_up


@triton.jit
def _sigmoid(x):
    one = tl.full(x.shape, 1.0, tl.float32)
    return tl.div_rn(one, one + tl.exp(-x))


@triton.jit(do_not_specialize=["N"])
def _swiglu(gate, up, y, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < N, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(y + at, (g * _sigmoid(g) * u).to(y.dtype.element_ty), mask=at < N)


@triton.jit(do_not_specialize=["N"])
def _swiglu_backward(grad, gate, up, grad_gate, grad_up, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(grad + at, mask=at < N, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=at < N, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < N, other=0.0).to(tl.float32)
    s = _sigmoid(g)
    tl.store(grad_gate + at, (d * u * (s * (1 + g * (1 - s)))).to(grad_gate.dtype.element_ty), mask=at < N)
    tl.store(grad_up + at, (d * (g * s)).to(grad_up.dtype.element_ty), mask=at < N)
