"""The layers that a decoder is made of: linear, embedding, SwiGLU; the norm is in `drumline.models.norm`.

Weights keep their own dtype (fp32 masters); a layer computes in the dtype of its input and casts the weight to it. So
plain fp32, fp32 masters under bf16 activations, and weights that sharding has cast already run through the same lines.
No layer initializes itself: `drumline.models.initialize` does, from logical names.

B sequences, T tokens, D model width, F hidden width.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from drumline.numerics import kernels


class Linear(nn.Linear):
    """y = x W^T without bias; W is [out, in]."""

    def __init__(self, in_features: int, out_features: int, device: torch.device | str = "meta"):
        super().__init__(in_features, out_features, bias=False, device=device, dtype=torch.float32)

    def reset_parameters(self) -> None:
        """Does nothing: torch's own initialization would draw from the global generator."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight.to(input.dtype))


def project(x: torch.Tensor, layers: Sequence[Linear]) -> Sequence[torch.Tensor]:
    """Several layers of one input. A module calls what it has in this one's place, so that it may be spread."""
    return [layer(x) for layer in layers]


class Embedding(nn.Embedding):
    """One row of W a token; the rows are cast to `compute_dtype`."""

    num_calls_before: int = 0
    """Forwards of it in other parts of a model that is cut, before the first of a micro-batch here."""

    def __init__(self, num_rows: int, dim: int, compute_dtype: torch.dtype, device: torch.device | str = "meta"):
        super().__init__(num_rows, dim, device=device, dtype=torch.float32)
        self.compute_dtype = compute_dtype

    def reset_parameters(self) -> None:
        """Does nothing: torch's own initialization would draw from the global generator."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _Rows.apply(input, self.weight, self.compute_dtype)


class _Rows(torch.autograd.Function):
    """Rows of a weight. Its gradient sums a token's occurrences in fp32 at least, whatever dtype the weight is in."""

    @staticmethod
    def forward(ctx, tokens, weight, dtype):
        ctx.save_for_backward(tokens)
        ctx.num_rows, ctx.weight_dtype = weight.shape[0], weight.dtype
        return F.embedding(tokens, weight).to(dtype)

    @staticmethod
    def backward(ctx, *grad_outputs):
        (tokens,) = ctx.saved_tensors
        grad = grad_outputs[0].to(torch.promote_types(ctx.weight_dtype, torch.float32))
        rows = torch.ops.aten.embedding_dense_backward(grad, tokens, ctx.num_rows, -1, False)
        return None, rows.to(ctx.weight_dtype), None


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)).

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, dim: int, hidden_dim: int, device: torch.device | str = "meta"):
        super().__init__()
        self.project = project
        self.gate_proj = Linear(dim, hidden_dim, device)
        self.up_proj = Linear(dim, hidden_dim, device)
        self.down_proj = Linear(hidden_dim, dim, device)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(*self.project(x_BTD, (self.gate_proj, self.up_proj))))


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of any shape, in their dtype."""
    if kernels.take(gate, up):
        return kernels.swiglu(gate, up)
    return F.silu(gate) * up if torch.compiler.is_compiling() else _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    """Keeps gate and up only; silu(gate), as large again, costs little to compute once more."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, *grad_outputs):
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad_outputs[0] * up, gate)
        return grad_gate, grad_outputs[0] * F.silu(gate)
