"""A whole decoder in fixed pieces: the bits of one rank at every degree, and the mathematics of torch in fp64."""

import pytest
import torch
from tests.parallel.exact.decoders import (
    EXPERTS,
    SIGMOID,
    alone,
    fill_balance,
    loss_and_gradients,
    mesh_of,
    own,
    recipe,
    tokens,
    weights,
)
from tests.ranks import ranks

from drumline import models


def bits_of_one_rank(*overrides, dtype=torch.float32, with_documents=True):
    wanted = recipe(*overrides)
    loss, grads = loss_and_gradients(wanted, mesh_of(wanted), dtype, with_documents)
    one = recipe(*overrides, "layout=dp1")
    expected, wholes = loss_and_gradients(one, alone(), dtype, with_documents)
    assert torch.equal(loss, expected), (loss.item(), expected.item())
    different = [name for name in wholes if not torch.equal(grads[name].tensor, own(wholes[name].tensor, grads[name]))]
    assert not different, different


@pytest.mark.parametrize("overrides", [(), EXPERTS, SIGMOID], ids=["dense", "experts", "sigmoid"])
def test_alone_it_is_the_mathematics_of_torch(overrides):
    one = recipe(*overrides)
    loss, grads = loss_and_gradients(one, alone(), torch.float64)
    model = models.build(one.model, compute_dtype=torch.float64).double()
    model.to_empty(device="cpu")
    fill_balance(model)
    model.load_state_dict(weights(one), strict=False)
    tokens_BT, labels_BT, starts_BT = tokens()
    expected = model(tokens_BT, labels_BT=labels_BT, starts_BT=starts_BT)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for name, param in model.named_parameters():
        torch.testing.assert_close(grads[name].tensor, param.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
@ranks(2)
def test_two_tensor_parallel_ranks(sequence_parallel, dtype):
    bits_of_one_rank("layout=tp2", f"layout.sequence_parallel={sequence_parallel}", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
@ranks(4)
def test_four_tensor_parallel_ranks(sequence_parallel, dtype):
    bits_of_one_rank("layout=tp4", f"layout.sequence_parallel={sequence_parallel}", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
@ranks(2)
def test_two_context_parallel_ranks(method, dtype):
    bits_of_one_rank("layout=cp2", f"layout.cp_method={method}", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "overrides",
    [
        ("layout=cp4",),
        ("layout=cp4", "layout.cp_method=gather"),
        ("layout=cp4", "layout.cp_method=ring_ulysses", "layout.cp_ulysses=2"),
        ("layout=cp2.tp2",),
        ("layout=cp2.tp2", "layout.cp_method=ulysses", "layout.sequence_parallel=false"),
        ("layout=cp2.tp2", "layout.cp_method=gather"),
    ],
    ids=" ".join,
)
@ranks(4)
def test_four_ranks_that_share_a_sequence(overrides, dtype):
    bits_of_one_rank(*overrides, dtype=dtype)


@ranks(4)
def test_without_documents():
    bits_of_one_rank("layout=cp2.tp2", with_documents=False)


@ranks(2)
def test_a_tied_embedding():
    bits_of_one_rank("layout=tp2", "model.tie_embeddings=true")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "overrides",
    [
        (*EXPERTS, "layout=tp2"),
        (*SIGMOID, "layout=tp2", "layout.sequence_parallel=false"),
        (*EXPERTS, "layout=cp2"),
        (*EXPERTS, "layout=cp2.ep2"),
    ],
    ids=lambda overrides: " ".join(overrides[-2:]),
)
@ranks(2)
def test_experts_on_two_ranks(overrides, dtype):
    bits_of_one_rank(*overrides, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["cp2.tp2", "cp2.tp2.ep2", "cp4.ep4"])
@ranks(4)
def test_experts_on_four_ranks(layout, dtype):
    bits_of_one_rank(*EXPERTS, f"layout={layout}", dtype=dtype)
