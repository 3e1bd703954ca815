"""The chunked cross-entropy against torch's own, and what it keeps."""

import pytest
import torch
import torch.nn.functional as F

from drumline.memory import AliveBytes
from drumline.models import chunked_cross_entropy


def case(num_tokens=70, dim=24, vocab=51, dtype=torch.float64, ignore_every=5):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, dim, generator=generator, dtype=torch.float64) * 0.3).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (num_tokens,), generator=generator)
    if ignore_every:
        labels[::ignore_every] = -100
    return hidden, weight, labels


def reference(hidden, weight, labels, scale=1.0):
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    (loss * scale).backward()
    return loss.detach(), hidden.grad, weight.grad


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("chunk", [1, 16, 35, 70, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_loss_and_gradients_equal_torch_cross_entropy_in_fp64(chunk, dtype, tolerance):
    hidden, weight, labels = case(dtype=dtype)
    loss = chunked_cross_entropy(chunk)(hidden, weight, labels)
    (loss * 0.37).backward()
    expected = reference(hidden, weight, labels, 0.37)
    for actual, wanted in zip((loss, hidden.grad, weight.grad), expected, strict=True):
        assert relative(actual, wanted) < tolerance


def test_a_bf16_hidden_state_with_fp32_weights_is_within_bf16_rounding():
    hidden, weight, labels = case(num_tokens=512, dim=64, vocab=211, dtype=torch.float32)
    low = hidden.detach().bfloat16().requires_grad_()
    loss = chunked_cross_entropy(128)(low, weight, labels)
    loss.backward()
    expected = reference(low, weight, labels)
    assert loss.dtype == weight.grad.dtype == torch.float32
    assert low.grad.dtype == torch.bfloat16
    assert relative(loss, expected[0]) < 2e-4
    assert relative(low.grad, expected[1]) < 6e-3
    assert relative(weight.grad, expected[2]) < 6e-3


def test_labels_that_do_not_count_leave_no_trace():
    hidden, weight, labels = case()
    labels[:] = -100
    loss = chunked_cross_entropy(16)(hidden, weight, labels)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.count_nonzero() == weight.grad.count_nonzero() == 0


def test_a_second_backward_gives_the_gradients_again():
    hidden, weight, labels = case()
    loss = chunked_cross_entropy(16)(hidden, weight, labels)
    first = torch.autograd.grad(loss, (hidden, weight), grad_outputs=torch.tensor(3.0).double(), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        assert relative(a, 3 * b) < 1e-14


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_gets_no_gradient(frozen):
    inputs = list(case())
    inputs[frozen] = inputs[frozen].detach()
    chunked_cross_entropy(16)(*inputs).backward()
    assert inputs[frozen].grad is None
    assert relative(inputs[1 - frozen].grad, reference(*inputs)[2 - frozen]) < 1e-14


def test_without_gradients_the_loss_is_the_same_and_nothing_is_kept():
    hidden, weight, labels = case()
    with torch.no_grad():
        loss = chunked_cross_entropy(16)(hidden, weight, labels)
    assert loss.grad_fn is None
    assert torch.equal(loss, chunked_cross_entropy(16)(hidden, weight, labels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_that_of_a_chunk_and_the_gradients(dtype):
    num_tokens, dim, vocab, chunk = 2048, 32, 1000, 128
    hidden, weight, labels = case(num_tokens, dim, vocab, dtype=torch.float32)
    hidden = hidden.detach().to(dtype).requires_grad_()
    with AliveBytes() as measured:
        chunked_cross_entropy(chunk)(hidden, weight, labels).backward()
    logits_bytes = num_tokens * vocab * 4
    chunk_bytes = 3 * chunk * vocab * 4  # logits, log-probabilities and one cast at a time
    kept_bytes = 2 * (num_tokens * dim + 2 * vocab * dim) * 4
    assert measured.peak < chunk_bytes + kept_bytes < logits_bytes / 2


def test_the_memory_meter_sees_full_logits():
    hidden, weight, labels = case(2048, 32, 1000, dtype=torch.float32)
    with AliveBytes() as measured:
        F.cross_entropy(F.linear(hidden, weight), labels.clamp(min=0)).backward()
    assert measured.peak >= 2 * 2048 * 1000 * 4


def test_gradients_of_a_bf16_weight_are_summed_over_chunks_in_fp32():
    hidden, weight, labels = case(num_tokens=2048, dim=16, vocab=31, dtype=torch.bfloat16)
    chunked_cross_entropy(8)(hidden, weight, labels).backward()
    assert weight.grad.dtype == torch.bfloat16
    assert relative(weight.grad, reference(hidden, weight, labels)[2]) < 6e-3
