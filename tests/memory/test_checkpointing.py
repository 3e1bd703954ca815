"""Activation checkpointing: the same bits, fewer bytes, the same names."""

import copy

import pytest
import torch
from tests.models.hf_reference import LLAMA, QWEN, make, random_tokens

from drumline.memory import apply_activation_checkpointing
from drumline.recipe.sections import Memory

KINDS = ("none", "full", "every_n", "selective")
DEEP = LLAMA.model_copy(update={"num_layers": 4})


def decoder_with(kind, model=DEEP, compute_dtype=torch.float32):
    decoder = make(model, compute_dtype=compute_dtype)
    apply_activation_checkpointing(decoder, Memory(activation_checkpointing=kind, every_n=2))
    return decoder


def run(decoder, starts_BT=None):
    """Loss and, by name, gradients; and the bytes that the forward keeps for the backward, weights apart."""
    tokens_BT = random_tokens(2, 65, decoder.shape.vocab_size)
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = decoder(tokens_BT[:, :-1], labels_BT=tokens_BT[:, 1:], starts_BT=starts_BT)
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in decoder.named_parameters()}, sum(kept.values())


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("model", [DEEP, QWEN], ids=["llama3", "qwen3"])
def test_loss_and_gradients_have_the_bits_of_no_checkpointing(kind, compute_dtype, model):
    starts_BT = torch.tensor([[0] * 30 + [30] * 34, [0] * 64], dtype=torch.int32)
    loss, gradients, _ = run(decoder_with(kind, model, compute_dtype), starts_BT)
    plain_loss, plain_gradients, _ = run(decoder_with("none", model, compute_dtype), starts_BT)
    assert torch.equal(loss, plain_loss)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain_gradients[name]), name


def test_saved_bytes_fall_in_the_order_none_selective_every_n_full():
    num_bytes = {kind: run(decoder_with(kind))[2] for kind in ("none", "every_n", "full")}
    assert num_bytes["full"] < num_bytes["every_n"] < num_bytes["none"]
    assert num_bytes["every_n"] - num_bytes["full"] == pytest.approx(
        (num_bytes["none"] - num_bytes["full"]) / 2, rel=0.02
    )


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_parameters_and_modules_stay(kind):
    decoder, plain = decoder_with(kind), decoder_with("none")
    assert [name for name, _ in decoder.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in decoder.named_modules()] == [name for name, _ in plain.named_modules()]


def test_a_copy_of_a_checkpointed_model_computes_with_its_own_weights():
    decoder = decoder_with("full")
    twin = copy.deepcopy(decoder)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()
    _, gradients, _ = run(twin)
    _, expected, _ = run(decoder_with("none"))
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
