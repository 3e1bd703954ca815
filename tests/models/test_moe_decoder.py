"""The decoder with experts against transformers' Qwen3-MoE, and faults that this comparison must catch."""

import pytest
import torch
import torch.nn.functional as F
from tests.models.hf_reference import make, random_tokens
from tests.models.moe_reference import MOE, hf_state, hf_twin, with_moe

from drumline.models.moe import Router, Routing

TOLERANCE = 5e-6
SHAPES = {
    "normalized": MOE,
    "as scored": with_moe(normalize_weights=False),
    "one expert a token": with_moe(experts_per_token=1, normalize_weights=False),
    "odd widths, by the loop": with_moe(expert_hidden_dim=23),
    "all layers": with_moe(num_dense_layers=0),
}


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def logits_error(decoder) -> float:
    tokens_BT = random_tokens(2, 100, decoder.shape.vocab_size)
    with torch.no_grad():
        return relative(decoder(tokens_BT), hf_twin(decoder)(tokens_BT).logits)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_transformers(shape):
    assert logits_error(make(SHAPES[shape])) < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_equal_those_of_transformers(shape):
    decoder = make(SHAPES[shape], loss_chunk_tokens=64)
    twin = hf_twin(decoder)
    tokens_BT = random_tokens(2, 101, decoder.shape.vocab_size)
    loss = decoder(tokens_BT[:, :-1], labels_BT=tokens_BT[:, 1:])
    logits = twin(tokens_BT[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten(), reduction="sum")
    loss.backward()
    expected.backward()
    assert relative(loss, expected) < TOLERANCE
    theirs = {name: parameter.grad for name, parameter in twin.named_parameters()}
    ours = hf_state({name: parameter.grad for name, parameter in decoder.named_parameters()})
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert relative(gradient, theirs[name]) < 6 * TOLERANCE, name


def test_fp32_is_as_near_to_fp64_as_rounding():
    decoder = make(MOE)
    double = make(MOE, dtype=torch.float64)
    tokens_BT = random_tokens(2, 100, MOE.vocab_size)
    with torch.no_grad():
        assert relative(decoder(tokens_BT).double(), double(tokens_BT)) < TOLERANCE


def unnormalized(routing: Routing) -> Routing:
    weights_NK = routing.probability_NE.gather(1, routing.experts_NK)
    return routing._replace(weights_NK=weights_NK)


def normalized_over_all_experts(routing: Routing) -> Routing:
    return routing._replace(weights_NK=routing.weights_NK / routing.weights_NK.sum())


def weights_of_other_choices(routing: Routing) -> Routing:
    return routing._replace(weights_NK=routing.weights_NK.flip(1))


def experts_off_by_one(routing: Routing) -> Routing:
    return routing._replace(experts_NK=(routing.experts_NK + 1) % 8)


def one_expert_less(routing: Routing) -> Routing:
    weights_NK = routing.weights_NK.clone()
    weights_NK[:, -1] = 0
    return routing._replace(weights_NK=weights_NK)


@pytest.mark.parametrize(
    "fault",
    [unnormalized, normalized_over_all_experts, weights_of_other_choices, experts_off_by_one, one_expert_less],
)
def test_the_comparison_catches_a_wrong_router(fault, monkeypatch):
    right = Router.forward
    monkeypatch.setattr(Router, "forward", lambda self, x_ND: fault(right(self, x_ND)))
    assert logits_error(make(MOE)) > 100 * TOLERANCE


def test_the_comparison_catches_experts_in_another_order():
    decoder = make(MOE)
    twin = hf_twin(decoder)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if ".experts.down_proj" in name:
                parameter.copy_(parameter.roll(1, 0))
        tokens_BT = random_tokens(2, 100, MOE.vocab_size)
        assert relative(decoder(tokens_BT), twin(tokens_BT).logits) > 100 * TOLERANCE
