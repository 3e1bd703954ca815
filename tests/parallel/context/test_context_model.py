"""A whole decoder whose sequence is spread: loss and every parameter's gradient against fp64 on one device."""

import pytest
import torch
import torch.distributed as dist
from tests.models.deepseek_reference import DEEPSEEK, YARN
from tests.parallel.context.comparison import groups_of, starts_of
from tests.ranks import ranks

from drumline.data import Ahead, Batch
from drumline.models import build, decoder, initialize
from drumline.models.attention import SdpaAttend
from drumline.parallel.context import context_attend
from drumline.recipe.sections import Model

MODEL = Model(
    vocab_size=64, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden_dim=64, init_std=0.2
)
LATENT = DEEPSEEK.model_copy(update={"yarn": YARN, "num_mtp_layers": 2, "vocab_size": 64, "init_std": 0.2})
TOKENS = 96


def batch(num_ahead):
    tokens = torch.randint(0, 64, (2, TOKENS + 1 + num_ahead), generator=torch.Generator().manual_seed(0))
    starts = starts_of(TOKENS)

    def labels(by):
        same = torch.zeros(2, TOKENS, dtype=torch.bool)
        same[:, :-by] = starts[:, by:] == starts[:, :-by]
        return tokens[:, by : by + TOKENS].masked_fill(~same, -100)

    ahead = tuple(Ahead(tokens[:, depth : depth + TOKENS], labels(depth + 1)) for depth in range(1, num_ahead + 1))
    return Batch(tokens[:, :TOKENS], labels(1), starts, ahead)


def loss_and_gradients(shape, attend, dtype, part):
    model = build(shape, compute_dtype=dtype, attend=attend, device="cpu")
    initialize(model, seed=0)
    model = model.to(torch.promote_types(dtype, torch.float32))
    loss = model(part.tokens_BT, starts_BT=part.starts_BT, labels_BT=part.labels_BT, ahead=part.ahead)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("shape", [MODEL, LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize(("method", "ulysses"), [("ring", 1), ("gather", 1), ("ulysses", 4), ("ring_ulysses", 2)])
@ranks(4)
def test_loss_and_gradients_summed_over_ranks_are_those_of_one_device(shape, method, ulysses, monkeypatch):
    groups = groups_of(4, ulysses)
    whole = batch(shape.num_mtp_layers)
    exact = loss_and_gradients(shape, SdpaAttend(), torch.float64, whole)
    one = loss_and_gradients(shape, SdpaAttend(), torch.float32, whole)

    real = decoder.tables  # what the model makes for its own tokens must be made for the whole sequence
    monkeypatch.setattr(decoder, "tables", lambda shape, tokens, device: real(shape, 4 * tokens, device))
    part = groups.split.shard_batch(whole)
    spread = loss_and_gradients(shape, context_attend(method, groups, SdpaAttend()), torch.float32, part)
    for name, value in spread.items():
        dist.all_reduce(value)
        error, of_one = (value - exact[name]).norm(), (one[name] - exact[name]).norm()
        assert error <= 4 * of_one.clamp(min=1e-7 * exact[name].norm()), name
