"""torch's own operators under the names of drumline's, for contrast."""

import torch
import torch.nn.functional as F
from torch import Tensor


class Torch:
    """What a model would call without drumline's operators."""

    softmax = staticmethod(torch.softmax)
    log_softmax = staticmethod(torch.log_softmax)
    sum = staticmethod(torch.sum)
    mean = staticmethod(torch.mean)
    matmul = staticmethod(torch.matmul)
    linear = staticmethod(F.linear)

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """torch's RMSNorm."""
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        """From torch's silu."""
        return F.silu(gate) * up

    @staticmethod
    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        """torch's loss of each row, in fp32 as drumline's."""
        return F.cross_entropy(logits.float(), labels, reduction="none")

    @staticmethod
    def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
        """torch's embedding."""
        return F.embedding(tokens, weight)

    @staticmethod
    def weight_gradient(grad: Tensor, x: Tensor, start: Tensor | None = None) -> Tensor:
        """A chunk's gradient, added to those before in fp32, as gradient accumulation does."""
        part = (grad.t() @ x).float()
        return part if start is None else start + part

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """torch's scaled dot product attention after rotation; queries are those of the last tokens."""
        first = k.shape[1] - q.shape[1]

        def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            u, w = x.float().chunk(2, dim=-1)
            y = torch.cat((u * cos - w * sin, w * cos + u * sin), dim=-1)
            return y.to(x.dtype).transpose(1, 2)

        cos, sin = cos[:, None], sin[:, None]
        queries, keys, values = rotated(q, cos[first:], sin[first:]), rotated(k, cos, sin), v.transpose(1, 2)
        mask = None
        if first:
            position = torch.arange(k.shape[1])
            mask = position <= position[first:, None]
        is_grouped = q.shape[2] != k.shape[2]
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
        )
        return out.transpose(1, 2)
