"""Parts of a decoder, one after the other, are the decoder."""

from itertools import pairwise

import pytest
import torch
from tests.models.hf_reference import LLAMA, QWEN, random_tokens

from drumline.models import Part, build, initialize

TIED = LLAMA.model_copy(update={"tie_embeddings": True})


def parts_of(model, cuts):
    bounds = [0, *cuts, model.num_layers]
    parts = []
    for first, end in pairwise(bounds):
        part = Part(range(first, end), has_embedding=first == 0, has_output=end == model.num_layers)
        parts.append(build(model, device="cpu", part=part))
        initialize(parts[-1], 0)
    return parts


@pytest.mark.parametrize("model", [LLAMA, QWEN, TIED], ids=["llama3", "qwen3", "tied"])
def test_parts_in_turn_give_the_bits_of_the_whole_model(model):
    tokens_BT = random_tokens(2, 65, model.vocab_size)
    inputs_BT, labels_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    whole = build(model, device="cpu")
    initialize(whole, 0)
    hidden_BTD = None
    for part in parts_of(model, [1]):
        found = part(inputs_BT, hidden_BTD=hidden_BTD, labels_BT=labels_BT)
        if isinstance(found, tuple):
            hidden_BTD, aux_loss = found
            assert aux_loss == 0
    expected = whole(inputs_BT, labels_BT=labels_BT)
    assert torch.equal(found, expected)
    assert expected > 0


def test_parts_have_the_parameters_and_names_of_the_whole_model():
    whole = {name: tuple(param.shape) for name, param in build(LLAMA).named_parameters()}
    found = [(name, tuple(p.shape)) for part in parts_of(LLAMA, [1]) for name, p in part.named_parameters()]
    assert dict(found) == whole
    assert len(found) == len(whole)


def test_the_first_and_the_last_part_hold_a_tied_embedding():
    first, last = ({name for name, _ in part.named_parameters()} for part in parts_of(TIED, [1]))
    assert first & last == {"embedding.weight"}
    assert first | last == {name for name, _ in build(TIED).named_parameters()}
