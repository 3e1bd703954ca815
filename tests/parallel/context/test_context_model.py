"""A whole decoder whose sequence is spread: loss and every parameter's gradient against fp64 on one device."""

import pytest
import torch
import torch.distributed as dist
from tests.parallel.context.comparison import groups_of, starts_of
from tests.ranks import ranks

from drumline.data import Batch
from drumline.models import build, decoder, initialize
from drumline.models.attention import SdpaAttend
from drumline.parallel.context import context_attend
from drumline.recipe.sections import Model

MODEL = Model(
    vocab_size=64, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden_dim=64, init_std=0.2
)
TOKENS = 96


def batch():
    tokens = torch.randint(0, 64, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    starts = starts_of(TOKENS)
    labels = torch.full_like(tokens, -100)
    same = starts[:, 1:] == starts[:, :-1]
    labels[:, :-1][same] = tokens[:, 1:][same]
    return Batch(tokens, labels, starts)


def loss_and_gradients(attend, dtype, part):
    model = build(MODEL, compute_dtype=dtype, attend=attend, device="cpu")
    initialize(model, seed=0)
    model = model.to(torch.promote_types(dtype, torch.float32))
    loss = model(part.tokens_BT, starts_BT=part.starts_BT, labels_BT=part.labels_BT)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize(("method", "ulysses"), [("ring", 1), ("gather", 1), ("ulysses", 4), ("ring_ulysses", 2)])
@ranks(4)
def test_loss_and_gradients_summed_over_ranks_are_those_of_one_device(method, ulysses, monkeypatch):
    groups = groups_of(4, ulysses)
    exact = loss_and_gradients(SdpaAttend(), torch.float64, batch())
    one = loss_and_gradients(SdpaAttend(), torch.float32, batch())

    real = decoder.tables  # what the model makes for its own tokens must be made for the whole sequence
    monkeypatch.setattr(decoder, "tables", lambda shape, tokens, device: real(shape, 4 * tokens, device))
    part = groups.split.shard_batch(batch())
    spread = loss_and_gradients(context_attend(method, groups, SdpaAttend()), torch.float32, part)
    for name, value in spread.items():
        dist.all_reduce(value)
        error, of_one = (value - exact[name]).norm(), (one[name] - exact[name]).norm()
        assert error <= 4 * of_one.clamp(min=1e-7 * exact[name].norm()), name
