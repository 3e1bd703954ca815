"""Which module of a decoder computes in fixed pieces, as data; and the applying of it.

The one set of operators serves every layout, one rank too: that is what makes their bits the same. Nothing is wrapped,
as in `drumline.parallel.tensor`.
"""

import math

from torch import nn

from drumline.models.attention import Attend
from drumline.models.decoder import Attention, Output
from drumline.models.layers import Embedding, FeedForward
from drumline.models.moe import MixtureOfExperts
from drumline.models.norm import RMSNorm
from drumline.parallel.context import ContextGroups
from drumline.parallel.context.ulysses import UlyssesAttend
from drumline.parallel.exact.attention import Chunks, ExactAttend
from drumline.parallel.exact.experts import ExactExperts, ExactMixture, Senders
from drumline.parallel.exact.feed_forward import ExactFeedForward
from drumline.parallel.exact.linear import Merged, Projected
from drumline.parallel.exact.norm import ExactHeadNorm, ExactNorm
from drumline.parallel.exact.pieces import Pieces
from drumline.parallel.exact.router import ExactRouter
from drumline.parallel.exact.vocabulary import ExactLoss, ExactOutput, ExactRows, share_of
from drumline.parallel.mesh import Mesh
from drumline.parallel.tensor.collectives import Ranks
from drumline.recipe.sections import Recipe


def pieces_of(recipe: Recipe, mesh: Mesh) -> Pieces:
    """The pieces of this rank. All ranks of the world must call it.

    Args:
        recipe: model, layout and numerics.blocks are read.
        mesh: of the layout.

    Returns:
        The pieces.
    """
    layout, blocks = recipe.layout, recipe.numerics.blocks
    tensor, context, both = (_ranks(mesh, *axes) for axes in (("tp",), ("cp",), ("cp", "tp")))
    shares_tokens = tensor is not None and layout.sequence_parallel
    return Pieces(blocks, 2 * blocks, _groups(recipe), tensor, context, both, shares_tokens)


def exact_attend(recipe: Recipe, groups: ContextGroups | None) -> Attend:
    """What computes attention in fixed pieces, over a sequence that ranks may share.

    Args:
        recipe: model, layout and numerics.blocks are read.
        groups: of the layout's cp axis; None: no ranks share a sequence.

    Returns:
        An `Attend`, called as that of `drumline.parallel.context.context_attend`.
    """
    group_width = recipe.model.num_kv_heads // _groups(recipe)
    num_chunks, in_ring = 2 * recipe.numerics.blocks, recipe.layout.cp_method in ("ring", "ring_ulysses")
    if groups is None:
        return ExactAttend(Chunks(num_chunks, None, in_ring), group_width)
    ring, split = groups.ring, groups.ring_split
    ranks = None if ring is None else Ranks(ring, split.degree, split.rank)
    inner = ExactAttend(Chunks(num_chunks, ranks, in_ring), group_width)
    return inner if groups.ulysses is None else UlyssesAttend(inner, groups.ulysses_degree, groups.ulysses)


def compute_in_pieces(model: nn.Module, mesh: Mesh, recipe: Recipe) -> None:
    """Makes a cut decoder compute in fixed pieces, in place. All ranks of the world must call it.

    Args:
        model: its parameters are this rank's, cut at blocks.
        mesh: of the layout.
        recipe: model, layout and numerics.blocks are read.
    """
    pieces = pieces_of(recipe, mesh)
    share, senders = share_of(recipe.model.vocab_size, pieces), _senders(mesh, pieces)
    for module in model.modules():
        if isinstance(module, Attention):
            module.project = Projected(pieces)  # pyright: ignore[reportAttributeAccessIssue]
            _replace(module.o_proj, Merged(module.o_proj, pieces))
            for norm in (module.q_norm, module.k_norm):
                if isinstance(norm, RMSNorm):
                    _replace(norm, ExactHeadNorm(norm, pieces))
        elif isinstance(module, FeedForward):
            _replace(module, ExactFeedForward(module, pieces))
        elif isinstance(module, MixtureOfExperts):
            _replace(module.experts, ExactExperts(module.experts, pieces, senders))
            _replace(module.router, ExactRouter(module.router, pieces))
            _replace(module, ExactMixture(module, pieces, senders))
        elif isinstance(module, RMSNorm) and not isinstance(module.forward, ExactHeadNorm):
            _replace(module, ExactNorm(module, pieces))
        elif isinstance(module, Embedding):
            _replace(module, ExactRows(module, share, pieces))
        elif isinstance(module, Output):
            module.cross_entropy = ExactLoss(share, pieces)
            _replace(module, ExactOutput(module, share, pieces))


def _replace(module: nn.Module, forward) -> None:
    module.forward = forward


def _ranks(mesh: Mesh, *axes: str) -> Ranks | None:
    group = mesh.group(*axes)
    if group is None:
        return None
    members = mesh.ranks_along(*axes)
    return Ranks(group, len(members), members.index(mesh.rank))


def _senders(mesh: Mesh, pieces: Pieces) -> Senders:
    there = [Mesh(mesh.layout, None, rank) for rank in mesh.ranks_along("ep")]
    data_ranks, places = [each.data_rank for each in there], [each.coordinate("cp") for each in there]
    return Senders(mesh.group("ep"), tuple(data_ranks), tuple(pieces.chunks_of(place) for place in places))


def _groups(recipe: Recipe) -> int:
    # A block may be less than a head; a tensor-parallel rank has whole heads.
    return math.gcd(recipe.numerics.blocks, recipe.model.num_kv_heads)
