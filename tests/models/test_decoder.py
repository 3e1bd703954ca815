"""The decoder against Hugging Face's transformers."""

import pytest
import torch
import torch.nn.functional as F
from tests.models.hf_reference import LLAMA, QWEN, hf_name, hf_twin, make, random_tokens

from drumline.models import build

BOTH = pytest.mark.parametrize("model", [LLAMA, QWEN], ids=["llama3", "qwen3"])
TOLERANCE = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-13)], ids=["fp32", "fp64"]
)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@BOTH
@TOLERANCE
def test_logits_equal_those_of_transformers(model, dtype, tolerance):
    decoder = make(model, dtype=dtype)
    tokens_BT = random_tokens(2, 100, model.vocab_size)
    with torch.no_grad():
        assert relative(decoder(tokens_BT), hf_twin(decoder)(tokens_BT).logits) < tolerance


@BOTH
@TOLERANCE
def test_loss_and_gradients_equal_those_of_transformers(model, dtype, tolerance):
    decoder = make(model, dtype=dtype, loss_chunk_tokens=64)
    twin = hf_twin(decoder)
    tokens_BT = random_tokens(2, 101, model.vocab_size)
    labels_BT = tokens_BT[:, 1:].clone()
    labels_BT[0, :7] = -100
    loss = decoder(tokens_BT[:, :-1], labels_BT=labels_BT)
    logits = twin(tokens_BT[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels_BT.flatten(), reduction="sum")
    loss.backward()
    expected.backward()
    assert relative(loss, expected) < tolerance
    gradients = dict(twin.named_parameters())
    for name, parameter in decoder.named_parameters():
        assert relative(parameter.grad, gradients[hf_name(name)].grad) < 4 * tolerance, name


@BOTH
def test_parameter_names_are_the_logical_names(model):
    names = {name for name, _ in build(model).named_parameters()}
    layer = "layers.1."
    expected = {layer + part + ".weight" for part in ("attention_norm", "mlp_norm", "mlp.gate_proj", "mlp.down_proj")}
    expected |= {"embedding.weight", "norm.weight", "layers.0.attention.q_proj.weight"}
    assert expected <= names
    assert ("output.weight" in names) is not model.tie_embeddings
    assert ("layers.0.attention.q_norm.weight" in names) is model.qk_norm
