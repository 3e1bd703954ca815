import pytest
import torch

from drumline.memory import apply_activation_checkpointing
from drumline.models import build, initialize
from drumline.models.dropout import Dropout
from drumline.recipe.sections import Memory, Model

SMALL = {"num_layers": 2, "dim": 32, "num_heads": 2, "num_kv_heads": 2, "hidden_dim": 48, "vocab_size": 64}


def places(rows: int, tokens: int, first: int = 0) -> torch.Tensor:
    return first + torch.arange(rows * tokens).view(rows, tokens)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_that_is_kept_is_one_less_the_rate_and_the_mean_stays(rate):
    dropped = Dropout(rate, 0, "s")(torch.ones(8, 256, 64), places(8, 256))
    kept = (dropped != 0).double().mean().item()
    deviation = (rate * (1 - rate) / dropped.numel()) ** 0.5
    assert abs(kept - (1 - rate)) < 5 * deviation
    torch.testing.assert_close(dropped.unique()[1:], torch.tensor([1 / (1 - rate)]), rtol=1e-4, atol=0.0)


def test_the_mask_is_a_function_of_the_token_whoever_holds_it():
    module = Dropout(0.3, 5, "s")
    whole = module.mask(places(4, 16), 40)
    assert torch.equal(module.mask(places(4, 16)[2:3, 5:9], 40), whole[2:3, 5:9])
    assert not torch.equal(Dropout(0.3, 6, "s").mask(places(4, 16), 40), whole)
    assert not torch.equal(Dropout(0.3, 5, "t").mask(places(4, 16), 40), whole)


def test_no_two_tokens_and_no_two_elements_share_a_mask():
    mask = Dropout(0.5, 0, "s").mask(places(1, 64), 128)[0].double() - 0.5
    correlation = mask @ mask.T / 128 / 0.25
    assert (correlation - torch.eye(64, dtype=torch.float64)).abs().max() < 6 / 128**0.5
    columns = mask.T @ mask / 64 / 0.25
    assert (columns - torch.eye(128, dtype=torch.float64)).abs().max() < 6 / 64**0.5


def test_gradients_pass_where_values_pass():
    x = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
    module = Dropout(0.25, 0, "s")
    module(x, places(2, 8)).sum().backward()
    assert torch.equal(x.grad, module(torch.ones_like(x), places(2, 8)))


def run(checkpointing: str, tokens, dropout=0.2, **options):
    model = build(Model(**SMALL, dropout=dropout), attend=None, seed=3)
    apply_activation_checkpointing(model, Memory(activation_checkpointing=checkpointing))
    model.to_empty(device="cpu")
    initialize(model, 3)
    loss = model(tokens, labels_BT=tokens.roll(-1, 1), **options)
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters()}


TOKENS = torch.arange(64).view(2, 32) * 7 % 64


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_what_is_computed_again_is_dropped_again(kind):
    loss, grads = run("none", TOKENS, places_BT=places(2, 32))
    again, grads_again = run(kind, TOKENS, places_BT=places(2, 32))
    assert torch.equal(loss, again)
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)


def test_nothing_is_dropped_where_no_places_are_given():
    loss, _ = run("none", TOKENS)
    assert torch.equal(loss, run("none", TOKENS, dropout=0.0)[0])
    assert not torch.equal(loss, run("none", TOKENS, places_BT=places(2, 32))[0])
