"""Evening the load: transformers' auxiliary loss, DeepSeek's bias, counts of the global batch and no less."""

import pytest
import torch
from tests.models.hf_reference import make, random_tokens
from tests.models.moe_reference import MOE, hf_state, hf_twin, with_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from drumline.memory import apply_activation_checkpointing
from drumline.models import update_balance
from drumline.models.moe import balance_loss, choose, next_bias, next_load
from drumline.recipe.sections import Memory, Moe

AUX = with_moe(balance="aux_loss", aux_loss_coefficient=0.3)  # layer 0 is dense: one layer with experts
BIAS = with_moe(balance="bias", bias_update_speed=0.25)


def counts_of(decoder, tokens_BT) -> dict[int, torch.Tensor]:
    found = {}
    with torch.no_grad():
        decoder(tokens_BT, on_routed=lambda layer, routed: found.update({layer: routed.counts_E}))
    return found


def experts_of(decoder):
    return {layer: block.mlp for layer, block in enumerate(decoder.layers) if decoder.shape.is_moe_layer(layer)}


def test_the_loss_of_one_layer_is_that_of_transformers():
    logits_NE = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    probability_NE = logits_NE.softmax(-1)
    experts_NK, _ = choose(probability_NE, Moe(num_experts=6, experts_per_token=3), None)
    load_E = next_load(torch.bincount(experts_NK.flatten(), minlength=6), 3)
    expected = load_balancing_loss_func((logits_NE,), 6, 3)
    torch.testing.assert_close(balance_loss(probability_NE, load_E) / 50, expected)


def test_an_even_load_costs_as_many_as_the_experts_of_a_token():
    probability_NE = torch.full((10, 8), 1 / 8)
    assert balance_loss(probability_NE, next_load(torch.full((8,), 25), 2)) / 10 == pytest.approx(2.0)


@pytest.fixture(scope="module")
def expected_gradients():
    """transformers' cross-entropy with its balancing loss over the whole batch, at the counts of that batch."""
    decoder = make(AUX)
    tokens_BT = random_tokens(4, 33, AUX.vocab_size)
    twin = hf_twin(decoder, output_router_logits=True, router_aux_loss_coef=0.3)
    found = twin(tokens_BT[:, :-1])
    cross_entropy = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), tokens_BT[:, 1:].flatten())
    (cross_entropy + 0.3 * load_balancing_loss_func((found.router_logits[-1],), 8, 3)).backward()
    return tokens_BT, float(cross_entropy.detach()), {name: p.grad for name, p in twin.named_parameters()}


def gradients_of(tokens_BT, num_micro_batches, *, fault=None, checkpointing="none"):
    """Our loss and gradients of the batch in micro-batches, at the counts of all of it (or, faultily, of each)."""
    decoder = make(AUX)
    apply_activation_checkpointing(decoder, Memory(activation_checkpointing=checkpointing))
    update_balance(experts_of(decoder), counts_of(decoder, tokens_BT[:, :-1]))
    total = 0.0
    for part_BT in tokens_BT.chunk(num_micro_batches):
        if fault == "own counts":
            update_balance(experts_of(decoder), counts_of(decoder, part_BT[:, :-1]))
        loss = decoder(part_BT[:, :-1], labels_BT=part_BT[:, 1:]) / (tokens_BT.numel() - len(tokens_BT))
        loss.backward()
        total += float(loss.detach())
    return total, hf_state({name: parameter.grad for name, parameter in decoder.named_parameters()})


def worst(gradients, expected) -> float:
    return max(float((grad - expected[name]).norm() / expected[name].norm()) for name, grad in gradients.items())


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_gradients_with_the_loss_are_those_of_transformers_however_the_batch_is_cut(
    num_micro_batches, checkpointing, expected_gradients
):
    tokens_BT, cross_entropy, expected = expected_gradients
    total, gradients = gradients_of(tokens_BT, num_micro_batches, checkpointing=checkpointing)
    assert total == pytest.approx(cross_entropy, rel=1e-6)  # the value is the cross-entropy alone
    assert worst(gradients, expected) < 2e-5


def test_the_comparison_catches_counts_of_each_rank_alone(expected_gradients):
    tokens_BT, _, expected = expected_gradients
    _, gradients = gradients_of(tokens_BT, 4, fault="own counts")
    assert worst(gradients, expected) > 1e-3


def test_the_first_step_has_no_counts_yet_and_so_no_balancing_gradient():
    tokens_BT = random_tokens(2, 33, AUX.vocab_size)
    found = []
    for model in (AUX, MOE):
        decoder = make(model)
        decoder(tokens_BT[:, :-1], labels_BT=tokens_BT[:, 1:]).backward()
        found.append(decoder.layers[1].mlp.router.weight.grad)
    assert torch.equal(*found)


def test_recomputing_a_block_counts_its_tokens_once():
    tokens_BT = random_tokens(2, 33, MOE.vocab_size)
    decoder = make(MOE)
    apply_activation_checkpointing(decoder, Memory(activation_checkpointing="full"))
    reports = []
    loss = decoder(tokens_BT[:, :-1], labels_BT=tokens_BT[:, 1:], on_routed=lambda *report: reports.append(report))
    loss.backward()
    assert [(layer, int(routed.counts_E.sum())) for layer, routed in reports] == [(1, 64 * 3)]


def test_the_bias_rises_below_the_mean_load_and_falls_above_it():
    bias_E = torch.tensor([0.5, 0.5, 0.5, 0.5])
    moved = next_bias(bias_E, torch.tensor([10, 11, 12, 11]), 0.25)
    assert moved.tolist() == [0.75, 0.5, 0.25, 0.5]


def test_the_bias_evens_the_load_of_a_router_that_prefers_some_experts():
    decoder = make(BIAS)
    tokens_BT = random_tokens(4, 64, BIAS.vocab_size)
    before = counts_of(decoder, tokens_BT)[1]
    with torch.no_grad():
        for _ in range(60):
            update_balance(experts_of(decoder), counts_of(decoder, tokens_BT))
        decoder.layers[1].mlp.router.moe = BIAS.moe.model_copy(update={"bias_update_speed": 0.005})
        for _ in range(60):
            update_balance(experts_of(decoder), counts_of(decoder, tokens_BT))
    after = counts_of(decoder, tokens_BT)[1]
    assert after.max() - after.min() < 0.3 * (before.max() - before.min())


def test_balance_is_state_of_the_run_and_no_parameter():
    for model, name in ((AUX, "load"), (BIAS, "bias")):
        decoder = make(model)
        assert [name for name, _ in decoder.named_buffers()] == [f"layers.1.mlp.router.{name}"]
        assert f"layers.1.mlp.router.{name}" not in dict(decoder.named_parameters())
        assert (decoder.layers[1].mlp.router.get_buffer(name) == 0).all()
