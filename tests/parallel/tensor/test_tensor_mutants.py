"""Faults of tensor parallelism that the comparison with fp64 must catch."""

from dataclasses import replace

import pytest
from tests.parallel.tensor.comparison import APART, ASYNC, EXPERTS, LATENT, NORMED, TIED, too_far
from tests.ranks import ranks

from drumline.parallel import apply, plan
from drumline.parallel.mesh import Mesh
from drumline.parallel.tensor import chunks, collectives, experts, tokens, vocabulary
from drumline.parallel.tensor.tokens import SameTokens


def with_places(patch, change):
    real = plan.cut_parameters

    def changed(*args, **kwargs):
        return {name: change(name, place) for name, place in real(*args, **kwargs).items()}

    patch(apply, "cut_parameters", changed)


def not_summed(place):
    return replace(place, partial=tuple(axis for axis in place.partial if axis != "tp"))


def gradients_of_norms_are_not_summed(patch):
    with_places(patch, lambda name, place: not_summed(place) if name.endswith("mlp_norm.weight") else place)


def gradients_of_norms_are_summed_though_whole(patch):
    def change(name, place):
        is_norm = name.endswith("mlp_norm.weight")
        return replace(place, partial=(*place.partial, "tp")) if is_norm else place

    with_places(patch, change)


def gradients_of_query_norms_are_not_summed(patch):
    with_places(patch, lambda name, place: not_summed(place) if "q_norm" in name else place)


def gradients_of_what_heads_share_in_a_latent_are_not_summed(patch):
    with_places(patch, lambda name, place: not_summed(place) if "kv_a_proj" in name else place)


def backward_of_entering_does_not_sum(patch):
    patch(SameTokens, "enter", lambda self, x: x)


def backward_of_leaving_sums_again(patch):
    def backward(ctx, grad):
        return collectives.reduced(grad, ctx.ranks), None

    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return collectives.reduced(x, ranks)

    patch(collectives._Reduce, "forward", staticmethod(forward))
    patch(collectives._Reduce, "backward", staticmethod(backward))


def backward_of_gathering_keeps_the_own_share(patch):
    def own(ctx, grad):
        return collectives.shares(grad, ctx.ranks.degree)[ctx.ranks.rank], None

    patch(collectives._Gather, "backward", staticmethod(own))


def backward_of_projections_keeps_the_own_share(patch):
    real = tokens.AtOnce.scatter

    def own(self, factors):
        if len(factors) == 1:  # the forward of a row-parallel layer
            return real(self, factors)
        share = tokens.shares(tokens.sum_of_products(factors), self._ranks.degree)[self._ranks.rank]
        return lambda: share

    patch(tokens.AtOnce, "scatter", own)


def every_rank_counts_the_loss(patch):
    patch(Mesh, "is_first_along", lambda self, *axes: True)


def vocabulary_is_off_by_one(patch):
    real = vocabulary.VocabularyShare.find

    def shifted(self, wanted):
        rows, is_here = real(self, wanted)
        return ((rows + 1) % self.num_rows).masked_fill(~is_here, 0), is_here

    patch(vocabulary.VocabularyShare, "find", shifted)


def tokens_beyond_the_last_row_are_found(patch):
    def find(self, wanted):
        rows = wanted - self.offset
        is_here = (rows >= 0) & (rows <= self.num_rows)
        return rows.clamp(max=self.num_rows - 1).masked_fill(~is_here, 0), is_here

    patch(vocabulary.VocabularyShare, "find", find)


def padding_counts_in_the_loss(patch):
    patch(vocabulary.VocabularyShare, "num_held", property(lambda self: self.num_rows))


def key_heads_of_ranks_are_swapped(patch):
    real = plan.place_of

    def swapped(shape, cut, mesh, **options):
        place, local = real(shape, cut, mesh, **options)
        if shape == (32, 32) and cut.tp == 0:  # of key and value projections
            place = replace(place, offsets=(shape[0] - local[0] - place.offsets[0], 0))
        return place, local

    patch(plan, "place_of", swapped)


def weights_of_experts_do_not_enter(patch):
    patch(experts._Entered, "combine", lambda self, y, weights: self.tokens.leave(self.inner.combine(y, weights)))


def sums_of_chunks_are_not_passed_on(patch):
    def own(self, factors):
        share = tokens.shares(tokens.sum_of_products(factors), self._ranks.degree)[self._ranks.rank]
        return lambda: share

    patch(chunks.InChunks, "scatter", own)


def chunks_come_the_other_way_round(patch):
    real = chunks.InChunks.gather

    def reverse(self, x, weights):
        products, whole = real(self, x, weights)
        return [tokens.joined(tokens.shares(product, self._ranks.degree).flip(0)) for product in products], whole

    patch(chunks.InChunks, "gather", reverse)


MUTANTS = [
    (gradients_of_norms_are_not_summed, ()),
    (gradients_of_norms_are_summed_though_whole, APART),
    (gradients_of_query_norms_are_not_summed, (*NORMED, *APART)),
    (gradients_of_query_norms_are_not_summed, NORMED),
    (gradients_of_what_heads_share_in_a_latent_are_not_summed, (*LATENT, *APART)),
    (backward_of_entering_does_not_sum, APART),
    (backward_of_leaving_sums_again, APART),
    (backward_of_gathering_keeps_the_own_share, ()),
    (backward_of_gathering_keeps_the_own_share, EXPERTS),
    (backward_of_projections_keeps_the_own_share, ()),
    (every_rank_counts_the_loss, ()),
    (vocabulary_is_off_by_one, ()),
    (tokens_beyond_the_last_row_are_found, ()),
    (padding_counts_in_the_loss, TIED),
    (padding_counts_in_the_loss, APART),
    (key_heads_of_ranks_are_swapped, ()),
    (weights_of_experts_do_not_enter, (*EXPERTS, *APART)),
    (sums_of_chunks_are_not_passed_on, ASYNC),
    (chunks_come_the_other_way_round, ASYNC),
]


@pytest.mark.parametrize(("fault", "overrides"), MUTANTS, ids=lambda value: getattr(value, "__name__", None))
@ranks(2)
def test_the_comparison_turns_red(fault, overrides, monkeypatch):
    fault(monkeypatch.setattr)
    assert too_far(*overrides, "layout.tp=2")
