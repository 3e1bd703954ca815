"""Which module of a decoder enters and leaves what is shared out, as data; and the applying of it.

Nothing is wrapped: names of parameters and modules stay, and a model of which a pipeline stage has a part is treated as
far as it goes.
"""

import torch
from torch import nn

from drumline.models.decoder import Attention, Output
from drumline.models.dropout import Dropout
from drumline.models.latent_attention import LatentAttention
from drumline.models.layers import Embedding, FeedForward, Linear
from drumline.models.loss import chunked_cross_entropy
from drumline.models.moe import MixtureOfExperts
from drumline.parallel.mesh import Mesh
from drumline.parallel.tensor.chunks import InChunks
from drumline.parallel.tensor.collectives import Ranks
from drumline.parallel.tensor.experts import SharedExperts
from drumline.parallel.tensor.tokens import AtOnce, SameTokens, SharedTokens, Tokens
from drumline.parallel.tensor.vocabulary import LossOfShare, SharedOutput, SharedRows, VocabularyShare
from drumline.recipe.sections import Recipe

LEFT_BY: dict[type[nn.Module], str] = {Attention: "o_proj", LatentAttention: "o_proj", FeedForward: "down_proj"}
"""Modules that all tokens enter by `project`, and the row-parallel layer by which they leave."""


class _Merged:
    """The forward of a row-parallel layer. An object and not a closure, as for checkpointing: it is copied."""

    def __init__(self, layer: Linear, tokens: Tokens):
        self._layer = layer
        self._tokens = tokens

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._tokens.merge(x, self._layer)


def spread_matmuls(model: nn.Module, mesh: Mesh, recipe: Recipe) -> None:
    """Makes the parts of a cut decoder communicate, in place. All ranks of the world must call it.

    Args:
        model: its parameters are this rank's.
        mesh: of the layout.
        recipe: layout, memory and the vocabulary are read.
    """
    group = mesh.group("tp")
    if group is None:
        return
    layout = recipe.layout
    ranks = Ranks(group, layout.tp, mesh.coordinate("tp"))
    matmuls = InChunks(ranks) if layout.tp_async else AtOnce(ranks)
    tokens = SharedTokens(ranks, matmuls) if layout.sequence_parallel else SameTokens(ranks)
    num_rows = -(-recipe.model.vocab_size // layout.tp)
    share = VocabularyShare(ranks.rank * num_rows, num_rows, recipe.model.vocab_size)
    for module in model.modules():
        if type(module) in LEFT_BY:
            module.project = tokens.project  # pyright: ignore[reportArgumentType]
            layer = module.get_submodule(LEFT_BY[type(module)])
            layer.forward = _Merged(layer, tokens)  # pyright: ignore[reportArgumentType]
        elif isinstance(module, MixtureOfExperts):
            module.dispatch = SharedExperts(module.dispatch, tokens, ranks if layout.sequence_parallel else None)
        elif isinstance(module, Dropout):
            module.own = tokens.own
        elif isinstance(module, Embedding):
            module.forward = SharedRows(module.forward, share, tokens.leave)  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(module, Output):
            chunk_tokens = recipe.memory.loss_chunk_tokens
            module.cross_entropy = chunked_cross_entropy(chunk_tokens, LossOfShare(share, ranks))
            module.forward = SharedOutput(module.forward, tokens, ranks, recipe.model.vocab_size)
