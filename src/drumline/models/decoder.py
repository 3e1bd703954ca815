"""The decoder of Llama 3, Qwen3 and DeepSeek-V3: embedding, blocks, norm, output projection or loss.

    x += drop(attention(norm(x)));  x += drop(mlp(norm(x)))     in every block; mlp: dense, or a mixture of experts
Single-device code that knows of no parallelism: what may be spread (attention, the loss, the way to the experts) is
handed in as a function.
Sources: Llama 3, arXiv:2407.21783; Qwen3, arXiv:2505.09388 (heads of queries and keys are normalized before the
rotation).

B sequences, T tokens, D model width, H query heads, G key/value heads, K head width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from drumline.models.attention import Attend, SdpaAttend
from drumline.models.dropout import Dropout
from drumline.models.latent_attention import LatentAttention
from drumline.models.layers import Embedding, FeedForward, Linear, project
from drumline.models.loss import CrossEntropy, chunked_cross_entropy
from drumline.models.moe import Dispatch, MixtureOfExperts, Routed, dispatch_locally
from drumline.models.multi_token import MultiToken
from drumline.models.norm import RMSNorm
from drumline.models.part import Layers, Part, whole
from drumline.models.rope import Rope, tables
from drumline.recipe.sections import Model


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; the sum itself is `attend`'s."""

    def __init__(self, model: Model, attend: Attend, device: torch.device | str = "meta"):
        super().__init__()
        self.head_dim = model.head_dim
        self.attend = attend
        self.project = project
        self.q_proj = Linear(model.dim, model.num_heads * model.head_dim, device)
        self.k_proj = Linear(model.dim, model.num_kv_heads * model.head_dim, device)
        self.v_proj = Linear(model.dim, model.num_kv_heads * model.head_dim, device)
        self.o_proj = Linear(model.num_heads * model.head_dim, model.dim, device)
        self.q_norm = RMSNorm(model.head_dim, model.norm_eps, device) if model.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(model.head_dim, model.norm_eps, device) if model.qk_norm else nn.Identity()

    def forward(self, x_BTD: torch.Tensor, rope: Rope, mask: Any) -> torch.Tensor:
        projected = self.project(x_BTD, (self.q_proj, self.k_proj, self.v_proj))
        # The number of heads is left to unflatten: a tensor-parallel rank holds some of them.
        q_BTHK, k_BTGK, v_BTGK = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        out_BTHK = self.attend(self.q_norm(q_BTHK), self.k_norm(k_BTGK), v_BTGK, rope, mask)
        return self.o_proj(out_BTHK.flatten(-2))


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
        seed: int = 0,
    ):
        super().__init__()
        self.attention_norm = RMSNorm(model.dim, model.norm_eps, device)
        make = Attention if model.mla is None else LatentAttention
        self.attention = make(model, attend, device)
        self.mlp_norm = RMSNorm(model.dim, model.norm_eps, device)
        if model.moe is not None and model.is_moe_layer(index):
            self.mlp = MixtureOfExperts(model.moe, model.dim, dispatch, device)
        else:
            self.mlp = FeedForward(model.dim, model.hidden_dim, device)
        self.attention_dropout: Dropout | None = None
        self.mlp_dropout: Dropout | None = None
        if model.dropout:
            self.attention_dropout = Dropout(model.dropout, seed, f"dropout/layers.{index}.attention")
            self.mlp_dropout = Dropout(model.dropout, seed, f"dropout/layers.{index}.mlp")

    def forward(
        self, x_BTD: torch.Tensor, rope: Rope, mask: Any = None, places_BT: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, Routed]:
        found_BTD = self.attention(self.attention_norm(x_BTD), rope, mask)
        if self.attention_dropout is not None:
            found_BTD = self.attention_dropout(found_BTD, places_BT)
        x_BTD = x_BTD + found_BTD
        found = self.mlp(self.mlp_norm(x_BTD))
        found_BTD, routed = (found, None) if isinstance(found, torch.Tensor) else found
        if self.mlp_dropout is not None:
            found_BTD = self.mlp_dropout(found_BTD, places_BT)
        x_BTD = x_BTD + found_BTD
        return x_BTD if routed is None else (x_BTD, routed)


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
    """A language model, tokens to logits or to the summed loss; or a part of one."""

    def __init__(
        self,
        model: Model,
        attend: Attend,
        cross_entropy: CrossEntropy,
        compute_dtype: torch.dtype,
        device: torch.device | str = "meta",
        dispatch: Dispatch = dispatch_locally,
        num_shares: int = 1,
        part: Part | None = None,
        seed: int = 0,
    ):
        super().__init__()
        self.shape = model
        self.part = part = part or whole(model.num_layers)
        self.num_shares = num_shares
        self.attend = attend
        self.compute_dtype = compute_dtype
        if part.has_embedding or (part.has_output and model.shares_embedding):
            self.embedding = Embedding(model.vocab_size, model.dim, compute_dtype, device)
            # A last stage embeds the tokens of multi-token prediction, after the first stage embedded the others.
            self.embedding.num_calls_before = 0 if part.has_embedding else 1
        block = partial(Block, model, attend, device, dispatch=dispatch, seed=seed)
        self.layers = Layers({index: block(index=index) for index in part.layers})
        if part.has_output:
            self.norm = RMSNorm(model.dim, model.norm_eps, device)
            self.output = Output(model, cross_entropy, device)
        self.mtp = nn.ModuleList(
            MultiToken(model, block(index=model.num_layers + depth), device)
            for depth in range(model.num_mtp_layers if part.has_output else 0)
        )

    def forward(
        self,
        tokens_BT: torch.Tensor,
        *,
        hidden_BTD: torch.Tensor | None = None,
        starts_BT: torch.Tensor | None = None,
        labels_BT: torch.Tensor | None = None,
        ahead: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        on_routed: Callable[[int, Routed], None] | None = None,
        on_ahead: Callable[[torch.Tensor], None] | None = None,
        places_BT: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Runs the model, or the part of it that this is.

        Args:
            tokens_BT: int64 tokens.
            hidden_BTD: what the part before gave, in the compute dtype; None where this part has the embedding.
            starts_BT: int32; for each token the index in its row of its document's first token: token i sees j where
                starts[i] <= j <= i. None: causal over the whole row.
            labels_BT: int64 next tokens, -100 where none counts. None: logits are wanted.
            ahead: for each module of multi-token prediction, tokens_BT that are so many places further on, and their
                labels_BT. Empty: the modules do not run.
            on_routed: is told what the router of each layer did, with the layer's index; modules of multi-token
                prediction follow the layers.
            on_ahead: is told the summed cross-entropy of each module, [num_mtp_layers].
            places_BT: int64, each token's number in the run, which dropout is a function of. None: nothing is dropped.

        Returns:
            Without labels logits_BTV in the compute dtype; with labels the sum of cross-entropy over the labels that
            count, a scalar of fp32 at least. The caller divides by the global number of such labels. A balancing loss,
            and the loss of tokens further ahead, are in the gradient of that scalar, not in its value, so that losses
            can be compared. A part without the output gives hidden_BTD and its layers' balancing loss, a scalar that is
            to be added to the summed loss.
        """
        rope = tables(self.shape, self.num_shares * tokens_BT.shape[1], tokens_BT.device)
        prepare = getattr(self.attend, "prepare", None)
        mask = starts_BT if starts_BT is None or prepare is None else prepare(starts_BT, self.compute_dtype)
        x_BTD = self.embedding(tokens_BT) if hidden_BTD is None else hidden_BTD
        beside = x_BTD.new_zeros((), dtype=torch.promote_types(x_BTD.dtype, torch.float32))

        def stream(index: int, found: torch.Tensor | tuple[torch.Tensor, Routed]) -> torch.Tensor:
            nonlocal beside
            if isinstance(found, torch.Tensor):
                return found
            beside = beside + found[1].aux_loss
            if on_routed is not None:
                on_routed(index, found[1])
            return found[0]

        for index, block in self.layers.items():
            x_BTD = stream(index, block(x_BTD, rope, mask, places_BT))
        if not self.part.has_output:
            return x_BTD, beside
        shared_weight_VD = self.embedding.weight if self.shape.tie_embeddings else None
        hidden_BTD = self.norm(x_BTD)
        result = self.output(hidden_BTD, labels_BT, shared_weight_VD)
        if labels_BT is None:
            return result
        losses = []
        modules = zip(self.mtp, ahead, strict=True) if ahead else ()
        for index, (module, (further_BT, further_labels_BT)) in enumerate(modules, self.shape.num_layers):
            hidden_BTD = stream(index, module(hidden_BTD, self.embedding(further_BT), rope, mask, places_BT))
            losses.append(self.output(hidden_BTD, further_labels_BT, shared_weight_VD))
        if losses:
            losses_M = torch.stack(losses)
            beside = beside + self.shape.mtp_loss_weight * losses_M.mean()
            if on_ahead is not None:
                on_ahead(losses_M.detach())
        return result + (beside - beside.detach()) if beside.requires_grad else result


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
    part: Part | None = None,
    seed: int = 0,
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
        part: of the model that is built; None: all of it.
        seed: of the run, for dropout.

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
        part,
        seed,
    )
