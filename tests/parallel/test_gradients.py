"""Every way to spread data parallelism gives the gradients of one device at the same global batch, uneven valid
tokens included.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ranks import ranks
from torch import nn

from drumline.parallel.gradients import Alone
from drumline.parallel.mesh import build_mesh
from drumline.parallel.replicate import Replicate, split_into_buckets
from drumline.parallel.shard import Sharded, shard
from drumline.recipe import Layout

NUM_MICRO = 3


class Toy(nn.Module):
    """Blocks under `layers` and a tied weight, as a decoder has."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(2))
        self.unused = nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator)

    def forward(self, tokens, weights):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return ((x @ self.embedding.weight.T).logsumexp(-1) * weights).sum()


def batch(index):
    generator = torch.Generator().manual_seed(100 + index)
    tokens = torch.randint(0, 11, (4,), generator=generator)
    # Uneven: micro-batch i has i + 1 valid tokens out of 4, the last all.
    return tokens, (torch.arange(4) <= index % 4).float()


def accumulate(model, gradients, indices):
    gradients.zero_grad()
    for position, index in enumerate(indices):
        gradients.set_sync(position == len(indices) - 1)
        model(*batch(index)).backward()
    gradients.finish()


def full_gradients(model):
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def expected(world):
    model = Toy()
    accumulate(model, Alone(model.parameters()), range(world * NUM_MICRO))
    return full_gradients(model)


def check_equals_one_device(make, world):
    rank = torch.distributed.get_rank()
    model = Toy()
    gradients = make(model, rank)
    for _ in range(2):  # twice: a second step must not see the first
        accumulate(model, gradients, range(rank * NUM_MICRO, (rank + 1) * NUM_MICRO))
    found = full_gradients(model)
    for name, grad in expected(world).items():
        torch.testing.assert_close(
            found[name], grad, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("bucket_bytes", [1, 300, 10**9])
@ranks(4)
def test_replicas_sum_to_the_gradients_of_one_device(bucket_bytes):
    check_equals_one_device(
        lambda model, rank: Replicate(model.parameters(), torch.distributed.group.WORLD, bucket_bytes=bucket_bytes), 4
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("layout", [Layout(fsdp=4), Layout(dp=2, fsdp=2), Layout(fsdp=2, dp=1)], ids=str)
def test_shards_sum_to_the_gradients_of_one_device(layout, zero):
    @ranks(layout.num_ranks)
    def body():
        def make(model, rank):
            del model.unused  # FSDP2 leaves no gradient where none was computed
            mesh = build_mesh(layout, torch.device("cpu"), rank).axes("dp", "fsdp")
            shard(model, mesh, zero=zero, compute_dtype=torch.float32, reduce_dtype=torch.float32)
            return Sharded(model, zero)

        check_equals_one_device(make, layout.num_ranks)

    body()


@ranks(2)
def test_reduction_overlaps_the_backward_and_only_at_the_last_micro_batch():
    events = []
    model = Toy()
    model.embedding.weight.register_post_accumulate_grad_hook(lambda _: events.append("last gradient"))

    def log(flat, group):
        events.append("reduce")
        return torch.distributed.all_reduce(flat, group=group, async_op=True)

    gradients = Replicate(model.parameters(), torch.distributed.group.WORLD, all_reduce=log, bucket_bytes=1)
    del events[:]
    gradients.set_sync(False)
    model(*batch(0)).backward()
    assert events == ["last gradient"]
    gradients.set_sync(True)
    model.unused.weight.grad.zero_()
    model(*batch(0)).backward()
    gradients.finish()
    assert events.count("reduce") == len(list(model.parameters()))


@ranks(2)
def test_buckets_start_before_the_backward_ends():
    events = []
    model = Toy()
    del model.unused

    def log(flat, group):
        events.append("reduce")
        return torch.distributed.all_reduce(flat, group=group, async_op=True)

    model.embedding.weight.register_post_accumulate_grad_hook(lambda _: events.append("last gradient"))
    gradients = Replicate(model.parameters(), torch.distributed.group.WORLD, all_reduce=log, bucket_bytes=1)
    model(*batch(0)).backward()
    gradients.finish()
    assert events.index("last gradient") >= 8  # the eight tensors of the blocks are on their way by then


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 400))
def test_buckets_hold_every_parameter_once_in_reverse_order(sizes, bucket_bytes):
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    buckets = split_into_buckets(params, bucket_bytes)
    assert [id(p) for bucket in buckets for p in bucket] == [id(p) for p in reversed(params)]
    for bucket in buckets[:-1]:
        assert sum(4 * p.numel() for p in bucket) >= bucket_bytes
        assert sum(4 * p.numel() for p in bucket[:-1]) < bucket_bytes
