"""The entry: what it chooses, what it refuses, and what is sent when."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.parallel.context.comparison import Case, across_ranks, error_ratios, groups_of, inputs
from tests.ranks import ranks
from torch.utils.checkpoint import checkpoint

from drumline.models import Rope
from drumline.models.attention import SdpaAttend
from drumline.parallel.context import (
    ContextGroups,
    ContextSplit,
    context_attend,
    context_groups,
    documents,
    heads_problem,
    ring,
)
from drumline.parallel.mesh import Mesh
from drumline.recipe.errors import DrumlineError
from drumline.recipe.layout import Layout

METHODS = [("ring", 1), ("gather", 1), ("ulysses", 4), ("ring_ulysses", 2)]


def alone(degree=4, ulysses=1):
    return ContextGroups(ContextSplit(degree, 0), ulysses, None, None)


@pytest.mark.parametrize("method", ["ring", "gather"])
@ranks(4)
def test_documents_cut_into_pieces_give_the_same(method, monkeypatch):
    monkeypatch.setattr(documents, "MAX_PIECE", 3)
    ratios = error_ratios(Case(method, 8, 2, documents=True))
    assert all(ratio <= 4 for ratio in ratios.values()), ratios


@ranks(4)
def test_two_sequences_are_spread_beside_each_other():
    """dp2.cp2: the groups of one line never meet the other's."""
    for method, ulysses in (("ring", 1), ("gather", 1), ("ulysses", 2)):
        mesh = Mesh(Layout(dp=2, cp=2), None, dist.get_rank())
        groups = context_groups(mesh, ulysses)
        assert (groups.split.degree, groups.split.rank) == (2, mesh.coordinate("cp"))
        q, k, v, _, rope, _ = inputs(Case(method))
        q = q + mesh.coordinate("dp")  # another sequence for each line
        attend = context_attend(method, groups, SdpaAttend())
        out = attend(*(groups.split.shard(x) for x in (q, k, v)), rope, None)
        wanted = groups.split.shard(SdpaAttend()(q, k, v, rope, None))
        assert torch.allclose(out, wanted, atol=1e-12)


@pytest.mark.parametrize(("method", "ulysses"), METHODS)
@ranks(4)
def test_a_backward_run_twice_gives_the_same_bits(method, ulysses):
    groups = groups_of(4, ulysses)
    for case in (Case(method, 8, 2, ulysses=ulysses, documents=True), Case(method, 8, 2, ulysses=ulysses)):
        first, second = across_ranks(case, groups), across_ranks(case, groups)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("method", "ulysses"), METHODS)
@ranks(4)
def test_activation_checkpointing_gives_the_same_bits(method, ulysses):
    groups = groups_of(4, ulysses)
    q, k, v, grad, rope, starts = inputs(Case(method, 8, 2, documents=True))
    attend, split = context_attend(method, groups, SdpaAttend()), groups.split
    mask = attend.prepare(split.shard(starts), q.dtype)

    def gradients(run):
        leaves = [split.shard(x).requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(run(attend, *leaves, rope, mask), leaves, split.shard(grad))

    kept = gradients(lambda f, *arguments: f(*arguments))
    recomputed = gradients(lambda f, *arguments: checkpoint(f, *arguments, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


@ranks(2)
def test_the_ring_sends_before_it_computes_and_gradients_in_fp32(monkeypatch):
    events = []
    passing, compute, compute_backward = ring.Passing, ring.attend_block, ring.attend_block_backward

    class Recorded(passing):
        def __init__(self, sent, degree, rank, group, tag):
            events.append(("send", sent.dtype))
            super().__init__(sent, degree, rank, group, tag=tag)

        def wait(self):
            events.append("wait")
            return super().wait()

    def recorded(real):
        def run(*arguments):
            events.append("compute")
            return real(*arguments)

        return run

    monkeypatch.setattr(ring, "Passing", Recorded)
    monkeypatch.setattr(ring, "attend_block", recorded(compute))
    monkeypatch.setattr(ring, "attend_block_backward", recorded(compute_backward))
    across_ranks(Case("ring", dtype=torch.bfloat16), groups_of(2, 1))
    kv, grad = ("send", torch.bfloat16), ("send", torch.float32)
    forward = [kv, "compute", "wait", "compute"]
    backward = [kv, "compute", grad, "wait", "compute", "wait", grad, "wait"]
    assert events == forward + backward


@pytest.mark.parametrize("method", ["ring", "gather", "ulysses", "ring_ulysses"])
def test_one_rank_needs_no_group(method):
    q, k, v, _, rope, _ = inputs(Case(method))
    out = context_attend(method, alone(1), SdpaAttend())(q, k, v, rope, None)
    assert torch.allclose(out, SdpaAttend()(q, k, v, rope, None), atol=1e-12)


@pytest.mark.parametrize(("method", "ulysses"), [("ring", 1), ("gather", 1), ("ring_ulysses", 1)])
def test_tables_of_the_local_tokens_only_are_refused(method, ulysses):
    q, k, v, _, rope, _ = inputs(Case(method))
    local = Rope(rope.cos_TK2[:24], rope.sin_TK2[:24])
    with pytest.raises(ValueError, match=r"24 positions, but 24 tokens on each of 4 ranks are a sequence of 96"):
        context_attend(method, alone(4, ulysses), SdpaAttend())(*(x[:, :24] for x in (q, k, v)), local, None)


@pytest.mark.parametrize(
    ("method", "ulysses", "message"),
    [
        ("spiral", 1, r"'spiral' is no way .*\n  try: ring, gather, ulysses, ring_ulysses"),
        ("ring", 2, "ring over cp = 4 needs Ulysses groups of 1 ranks, not 2"),
        ("ulysses", 2, "ulysses over cp = 4 needs Ulysses groups of 4 ranks, not 2"),
    ],
)
def test_groups_that_do_not_fit_are_refused(method, ulysses, message):
    with pytest.raises(DrumlineError, match=message):
        context_attend(method, alone(4, ulysses), SdpaAttend())


def test_a_ulysses_degree_that_does_not_divide_cp_is_refused():
    with pytest.raises(DrumlineError, match=r"groups of 3 ranks do not divide layout.cp = 4\n  try: 1, 2, 4"):
        context_groups(Mesh(Layout(cp=4), None, 0), 3)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_heads_are_dealt_where_every_rank_gets_the_key_heads_of_its_query_heads(group, kv_heads, degree):
    """By what grouped attention takes: as many key heads on every rank, each under as many of its query heads."""
    heads = group * kv_heads
    fits = False
    if heads % degree == 0:
        mine = heads // degree
        needed = [Counter(h // group for h in range(r * mine, (r + 1) * mine)) for r in range(degree)]
        fits = len({n for counts in needed for n in counts.values()}) == 1 and len({len(c) for c in needed}) == 1
    assert (heads_problem(heads, kv_heads, degree) is None) == fits


@ranks(2)
def test_heads_that_cannot_be_dealt_say_which_degrees_fit():
    attend = context_attend("ulysses", groups_of(2, 2), SdpaAttend())
    q, k, v, _, rope, _ = inputs(Case("ulysses", heads=9, kv_heads=3))
    split = ContextSplit(2, dist.get_rank())
    with pytest.raises(
        DrumlineError, match=r"over 2 ranks cannot deal out 9 query heads .*\n.*try: a degree of 1, 3, 9"
    ):
        attend(*(split.shard(x) for x in (q, k, v)), rope, None)
