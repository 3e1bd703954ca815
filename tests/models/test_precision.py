"""Compute in bf16: how far it is from fp64, and that sharded and plain weights compute the same."""

import pytest
import torch
import torch.nn.functional as F
from tests.models.hf_reference import LLAMA, QWEN, hf_name, hf_twin, make, random_tokens

WIDE = {"dim": 128, "hidden_dim": 256, "num_layers": 4}
BOTH = pytest.mark.parametrize(
    "model", [LLAMA.model_copy(update=WIDE), QWEN.model_copy(update=WIDE)], ids=["llama3", "qwen3"]
)


def gradients(decoder, tokens_BT):
    loss = decoder(tokens_BT[:, :-1], labels_BT=tokens_BT[:, 1:])
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in decoder.named_parameters()}


@BOTH
def test_bf16_gradients_are_no_further_from_fp64_than_those_of_transformers_in_bf16(model):
    tokens_BT = random_tokens(2, 129, model.vocab_size)
    decoder = make(model, compute_dtype=torch.bfloat16)
    _, exact = gradients(make(model, dtype=torch.float64), tokens_BT)
    _, ours = gradients(decoder, tokens_BT)
    twin = hf_twin(decoder).bfloat16()
    logits = twin(tokens_BT[:, :-1]).logits
    F.cross_entropy(logits.float().flatten(0, 1), tokens_BT[:, 1:].flatten(), reduction="sum").backward()
    theirs = dict(twin.named_parameters())
    for name, gradient in ours.items():
        error = (gradient - exact[name]).norm() / exact[name].norm()
        peer = (theirs[hf_name(name)].grad - exact[name]).norm() / exact[name].norm()
        assert gradient.dtype == torch.float32
        assert error < 1.5 * peer + 1e-3, (name, error, peer)


@BOTH
def test_fp32_gradients_are_within_fp32_rounding_of_fp64(model):
    tokens_BT = random_tokens(2, 129, model.vocab_size)
    _, exact = gradients(make(model, dtype=torch.float64), tokens_BT)
    _, ours = gradients(make(model), tokens_BT)
    for name, gradient in ours.items():
        assert (gradient - exact[name]).norm() < 3e-6 * exact[name].norm(), name


@BOTH
def test_weights_cast_beforehand_compute_the_bits_of_fp32_masters(model):
    tokens_BT = random_tokens(2, 129, model.vocab_size)
    masters, cast = make(model, compute_dtype=torch.bfloat16), make(model, compute_dtype=torch.bfloat16).bfloat16()
    loss, ours = gradients(masters, tokens_BT)
    cast_loss, theirs = gradients(cast, tokens_BT)
    assert torch.equal(loss, cast_loss)
    for name, gradient in ours.items():
        if name == "embedding.weight" and model.tie_embeddings:  # two gradients are added, here in fp32, there in bf16
            assert (gradient - theirs[name]).norm() < 2**-7 * gradient.norm()
        else:
            assert torch.equal(gradient.bfloat16(), theirs[name]), name
