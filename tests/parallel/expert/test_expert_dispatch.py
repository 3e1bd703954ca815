"""What the dispatcher alone promises: the order of rows, nothing sent for a dropped choice, computing meanwhile."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.ranks import ranks

from drumline.models.moe import dispatch_locally, within_capacity
from drumline.parallel.expert import dispatch_over
from drumline.parallel.expert.dispatch import order_by_expert


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4))
def test_rows_of_an_expert_are_ordered_by_source_rank_and_then_as_sent(counts):
    sent = [(rank, expert, i) for rank, row in enumerate(counts) for expert, n in enumerate(row) for i in range(n)]
    order, inverse = order_by_expert(torch.tensor(counts), len(sent))
    assert [sent[i] for i in order] == sorted(sent, key=lambda row: (row[1], row[0], row[2]))
    assert order[inverse].tolist() == list(range(len(sent)))


def choices(rank, num_tokens):
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(num_tokens, 8, generator=generator).topk(2).indices


@ranks(4)
def test_an_expert_receives_the_tokens_of_all_ranks_in_their_order():
    rank, num_tokens = dist.get_rank(), (5, 0, 9, 2)  # ranks need not have as many tokens, or any
    x = torch.stack([torch.full((num_tokens[rank],), float(rank)), torch.arange(num_tokens[rank]).float()], 1)
    sent = dispatch_over(dist.group.WORLD)(x, choices(rank, num_tokens[rank]), 8, False)
    rows, counts = sent.receive()
    expected = [
        [source, token]
        for expert in (2 * rank, 2 * rank + 1)
        for source in range(4)
        for token in range(num_tokens[source])
        if expert in choices(source, num_tokens[source])[token]
    ]
    assert rows.tolist() == expected
    assert counts.sum() == len(expected)
    back = sent.combine(2 * rows, torch.full((num_tokens[rank], 2), 0.75))
    assert torch.equal(back, 3 * x)


@ranks(2)
def test_a_dropped_choice_is_not_sent(monkeypatch):
    rank, sizes = dist.get_rank(), []
    real = dist.all_to_all_single

    def watch(output, given, *args, **kwargs):
        sizes.append((len(output), len(given)))
        return real(output, given, *args, **kwargs)

    monkeypatch.setattr(dist, "all_to_all_single", watch)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    weights = torch.rand(16, 2, generator=torch.Generator().manual_seed(9), requires_grad=True)
    experts = torch.where(torch.rand(16, 2, generator=torch.Generator().manual_seed(rank)) < 0.7, 0, 5)
    kept = within_capacity(experts, 16, 8, 0.5)
    num_kept = int((kept < 8).sum())
    assert num_kept < 32
    found = {}
    for name, dispatch in (("spread", dispatch_over(dist.group.WORLD)), ("one", dispatch_locally)):
        sent = dispatch(x, kept, 8, True)
        rows, counts = sent.receive()
        y = rows[: counts.sum()].square()
        y = torch.cat([y, y.new_full((len(rows) - len(y), 4), torch.nan)])  # rows of no expert hold anything
        out = sent.combine(y, weights)
        found[name] = (out, *torch.autograd.grad(out.sin().sum(), (x, weights)))
    assert all(given == num_kept for _, given in sizes[1:2])
    assert sizes[2][0] == num_kept
    for a, b in zip(found["spread"], found["one"], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("is_backward", [False, True])
@ranks(2)
def test_what_is_computed_between_runs_while_rows_travel(is_backward, monkeypatch):
    events = []
    real = dist.all_to_all_single

    class Watched:
        def __init__(self, work):
            self.work = work

        def wait(self):
            events.append("wait")
            self.work.wait()

    def watch(*args, **kwargs):
        events.append("start")
        return Watched(real(*args, **kwargs))

    class Shared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            events.append("shared")
            return 2 * x

        @staticmethod
        def backward(ctx, *grad_outputs):
            events.append("shared")
            return 2 * grad_outputs[0]

    monkeypatch.setattr(dist, "all_to_all_single", watch)
    x = torch.randn(6, 4, requires_grad=True)
    sent = dispatch_over(dist.group.WORLD)(x, choices(dist.get_rank(), 6), 8, False)
    shared = Shared.apply(x)
    y = sent.combine(sent.receive()[0], torch.ones(6, 2)) + shared
    if is_backward:
        events.clear()
        y.sum().backward()
        assert events == ["start", "wait", "start", "shared", "wait"]
        torch.testing.assert_close(x.grad, torch.full((6, 4), 4.0))
    else:
        # counts, rows out, meanwhile the shared experts, rows back
        assert events == ["start", "wait", "start", "shared", "wait", "start", "wait"]
