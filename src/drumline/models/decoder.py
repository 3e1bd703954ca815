"""The decoder of Llama 3 and Qwen3, dense or with experts: embedding, blocks, norm, output projection or loss.

    x += attention(norm(x));  x += mlp(norm(x))          in every block; mlp: dense, or a mixture of experts
Single-device code that knows of no parallelism: what may be spread (attention, the loss, the way to the experts) is
handed in as a function.
Sources: Llama 3, arXiv:2407.21783; Qwen3, arXiv:2505.09388 (heads of queries and keys are normalized before the
rotation).

B sequences, T tokens, D model width, H query heads, G key/value heads, K head width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from drumline.models.attention import Attend, SdpaAttend
from drumline.models.layers import Embedding, FeedForward, Linear
from drumline.models.loss import CrossEntropy, chunked_cross_entropy
from drumline.models.moe import Dispatch, MixtureOfExperts, Routed, dispatch_locally
from drumline.models.norm import RMSNorm
from drumline.models.rope import Rope, tables
from drumline.recipe.sections import Model


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; the sum itself is `attend`'s."""

    def __init__(self, model: Model, attend: Attend, device: torch.device | str = "meta"):
        super().__init__()
        self.head_dim = model.head_dim
        self.attend = attend
        self.q_proj = Linear(model.dim, model.num_heads * model.head_dim, device)
        self.k_proj = Linear(model.dim, model.num_kv_heads * model.head_dim, device)
        self.v_proj = Linear(model.dim, model.num_kv_heads * model.head_dim, device)
        self.o_proj = Linear(model.num_heads * model.head_dim, model.dim, device)
        self.q_norm = RMSNorm(model.head_dim, model.norm_eps, device) if model.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(model.head_dim, model.norm_eps, device) if model.qk_norm else nn.Identity()

    def forward(self, x_BTD: torch.Tensor, rope: Rope, mask: Any) -> torch.Tensor:
        # The number of heads is left to unflatten: a tensor-parallel rank holds some of them.
        q_BTHK = self.q_norm(self.q_proj(x_BTD).unflatten(-1, (-1, self.head_dim)))
        k_BTGK = self.k_norm(self.k_proj(x_BTD).unflatten(-1, (-1, self.head_dim)))
        v_BTGK = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(self.attend(q_BTHK, k_BTGK, v_BTGK, rope, mask).flatten(-2))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to the residual stream.

    Where the feed-forward is a mixture of experts, the result is a pair: the stream, and what the router did.
    """

    def __init__(
        self,
        model: Model,
        attend: Attend,
        device: torch.device | str = "meta",
        *,
        index: int = 0,
        dispatch: Dispatch = dispatch_locally,
    ):
        super().__init__()
        self.attention_norm = RMSNorm(model.dim, model.norm_eps, device)
        self.attention = Attention(model, attend, device)
        self.mlp_norm = RMSNorm(model.dim, model.norm_eps, device)
        if model.moe is not None and model.is_moe_layer(index):
            self.mlp = MixtureOfExperts(model.moe, model.dim, dispatch, device)
        else:
            self.mlp = FeedForward(model.dim, model.hidden_dim, device)

    def forward(self, x_BTD: torch.Tensor, rope: Rope, mask: Any = None) -> torch.Tensor | tuple[torch.Tensor, Routed]:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, mask)
        found = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + found if isinstance(found, torch.Tensor) else (x_BTD + found[0], found[1])


class Output(nn.Module):
    """The output projection, or the loss through it. It owns no weight where the embedding's is shared."""

    def __init__(self, model: Model, cross_entropy: CrossEntropy, device: torch.device | str = "meta"):
        super().__init__()
        self.cross_entropy = cross_entropy
        self.weight: nn.Parameter | None = None
        if not model.tie_embeddings:
            self.weight = nn.Parameter(torch.empty(model.vocab_size, model.dim, dtype=torch.float32, device=device))

    def forward(
        self, x_BTD: torch.Tensor, labels_BT: torch.Tensor | None, shared_weight_VD: torch.Tensor | None
    ) -> torch.Tensor:
        weight_VD = self.weight if self.weight is not None else shared_weight_VD
        if weight_VD is None:
            raise ValueError("the output shares the embedding's weight, but none was given")
        if labels_BT is None:
            return F.linear(x_BTD, weight_VD.to(x_BTD.dtype))
        return self.cross_entropy(x_BTD.flatten(0, 1), weight_VD, labels_BT.flatten())


class Decoder(nn.Module):
    """A language model: tokens to logits, or to the summed loss."""

    def __init__(
        self,
        model: Model,
        attend: Attend,
        cross_entropy: CrossEntropy,
        compute_dtype: torch.dtype,
        device: torch.device | str = "meta",
        dispatch: Dispatch = dispatch_locally,
        num_shares: int = 1,
    ):
        super().__init__()
        self.shape = model
        self.num_shares = num_shares
        self.attend = attend
        self.compute_dtype = compute_dtype
        self.embedding = Embedding(model.vocab_size, model.dim, compute_dtype, device)
        self.layers = nn.ModuleList(
            Block(model, attend, device, index=index, dispatch=dispatch) for index in range(model.num_layers)
        )
        self.norm = RMSNorm(model.dim, model.norm_eps, device)
        self.output = Output(model, cross_entropy, device)

    def forward(
        self,
        tokens_BT: torch.Tensor,
        *,
        starts_BT: torch.Tensor | None = None,
        labels_BT: torch.Tensor | None = None,
        on_routed: Callable[[int, Routed], None] | None = None,
    ) -> torch.Tensor:
        """Runs the model.

        Args:
            tokens_BT: int64 tokens.
            starts_BT: int32; for each token the index in its row of its document's first token: token i sees j where
                starts[i] <= j <= i. None: causal over the whole row.
            labels_BT: int64 next tokens, -100 where none counts. None: logits are wanted.
            on_routed: is told what the router of each layer did, with the layer's index.

        Returns:
            Without labels logits_BTV in the compute dtype; with labels the sum of cross-entropy over the labels that
            count, a scalar of fp32 at least. The caller divides by the global number of such labels. A balancing loss
            is in the gradient of that scalar, not in its value, so that losses can be compared.
        """
        rope = tables(self.shape, self.num_shares * tokens_BT.shape[1], tokens_BT.device)
        prepare = getattr(self.attend, "prepare", None)
        mask = starts_BT if starts_BT is None or prepare is None else prepare(starts_BT, self.compute_dtype)
        x_BTD = self.embedding(tokens_BT)
        aux_loss = None
        for index, block in enumerate(self.layers):
            x_BTD = block(x_BTD, rope, mask)
            if isinstance(x_BTD, tuple):
                x_BTD, routed = x_BTD
                aux_loss = routed.aux_loss if aux_loss is None else aux_loss + routed.aux_loss
                if on_routed is not None:
                    on_routed(index, routed)
        shared_weight_VD = self.embedding.weight if self.shape.tie_embeddings else None
        result = self.output(self.norm(x_BTD), labels_BT, shared_weight_VD)
        return result if aux_loss is None or labels_BT is None else result + (aux_loss - aux_loss.detach())


def build(
    model: Model,
    *,
    compute_dtype: torch.dtype = torch.float32,
    attend: Attend | None = None,
    cross_entropy: CrossEntropy | None = None,
    loss_chunk_tokens: int = 1024,
    dispatch: Dispatch = dispatch_locally,
    device: torch.device | str = "meta",
    num_shares: int = 1,
) -> Decoder:
    """Builds a decoder whose fp32 parameters are not yet filled: `initialize` or a checkpoint does that.

    Args:
        model: the shape.
        compute_dtype: dtype of activations and matmuls.
        attend: what computes attention; None: torch's SDPA.
        cross_entropy: the loss of (hidden_ND, weight_VD, labels_N), summed; None:
            `chunked_cross_entropy(loss_chunk_tokens)`.
        loss_chunk_tokens: tokens whose logits exist at a time.
        dispatch: what carries tokens to the experts and back.
        device: where parameters live; on "meta" they take no memory until `to_empty`.
        num_shares: shares that a sequence is cut into, of which the model is given one at a time; `attend` knows which
            positions it holds and is given the rotary tables of the whole sequence.

    Returns:
        The model.
    """
    return Decoder(
        model,
        SdpaAttend() if attend is None else attend,
        chunked_cross_entropy(loss_chunk_tokens) if cross_entropy is None else cross_entropy,
        compute_dtype,
        device,
        dispatch,
        num_shares,
    )
