"""Row operators: right against fp64, and the same bits whatever surrounds a row."""

import pytest
import torch
import torch.nn.functional as F

from drumline.numerics import invariant
from drumline.numerics.invariant import native

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float64: 1e-12}


@pytest.fixture(params=["kernel", "plain"])
def form(request, monkeypatch):
    """Both forms of each operator."""
    if request.param == "plain":
        monkeypatch.setattr(native, "_built", lambda module: None)
    return request.param


def ones(*shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def swiglu(x):
    return invariant.swiglu(x, x.flip(-1))


def norm(x):
    return invariant.rms_norm(x, torch.linspace(0.5, 1.5, x.shape[-1]), 1e-5)


def labels_of(x):
    return torch.arange(x.shape[0]) % x.shape[-1]


CASES = {
    "softmax": (invariant.softmax, lambda x: F.softmax(x, -1)),
    "log_softmax": (invariant.log_softmax, lambda x: F.log_softmax(x, -1)),
    "sum": (lambda x: invariant.sum(x, -1), lambda x: x.sum(-1)),
    "mean": (lambda x: invariant.mean(x, -1), lambda x: x.mean(-1)),
    "swiglu": (swiglu, lambda x: F.silu(x) * x.flip(-1)),
    "rms_norm": (norm, lambda x: F.rms_norm(x, x.shape[-1:], torch.linspace(0.5, 1.5, x.shape[-1]).to(x.dtype), 1e-5)),
    "cross_entropy": (
        lambda x: invariant.cross_entropy(x, labels_of(x)),
        lambda x: F.cross_entropy(x, labels_of(x), reduction="none"),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_results_and_gradients_match_torch_in_fp64(name, dtype, form):
    own, torchs = CASES[name]
    x = ones(13, 77, dtype=dtype).requires_grad_()
    y = own(x)
    x64 = x.detach().double().requires_grad_()
    y64 = torchs(x64)
    seed = ones(*y.shape, dtype=y.dtype)
    (grad,), (grad64,) = torch.autograd.grad(y, x, seed), torch.autograd.grad(y64, x64, seed.double())
    for got, want in ((y, y64), (grad, grad64)):
        assert (got - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()
    assert grad.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if name != "cross_entropy"])
@pytest.mark.parametrize("width", [1, 31, 77, 1000])
def test_a_row_alone_has_the_bits_that_it_has_among_others(name, width, dtype, form):
    own = CASES[name][0]
    x = ones(37, width, dtype=dtype)
    whole, seed = own(x.requires_grad_()), None
    seed = ones(*whole.shape, dtype=whole.dtype)
    (grad,) = torch.autograd.grad(whole, x, seed)
    for first, last in ((0, 1), (5, 6), (7, 20), (36, 37)):
        part = x.detach()[first:last].clone().requires_grad_()
        y = own(part)
        assert torch.equal(y, whole[first:last])
        assert torch.equal(torch.autograd.grad(y, part, seed[first:last])[0], grad[first:last])


@pytest.mark.parametrize("width", [1, 5, 20_000, 40_000])
def test_a_long_sum_has_the_same_bits_with_any_number_of_threads(width):
    x = ones(3, width, dtype=torch.float32)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append((invariant.sum(x, -1), invariant.sum(x), invariant.sum(x.t(), 0)))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_sums_over_each_dim_match_torch(form):
    x = ones(5, 70, 9, dtype=torch.float64)
    for dim in (0, 1, 2, -1, -2, None):
        for keepdim in (False, True):
            want = x.sum() if dim is None else x.sum(dim, keepdim)
            want = want.reshape(1, 1, 1) if dim is None and keepdim else want
            got = invariant.sum(x, dim, keepdim)
            assert got.shape == want.shape
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_embedding_adds_a_tokens_occurrences_in_their_order(dtype, form):
    tokens = torch.randint(0, 7, (5, 40), generator=torch.Generator().manual_seed(1))
    weight = ones(7, 300, dtype=dtype).requires_grad_()
    grad = ones(5, 40, 300, dtype=dtype)
    invariant.embedding(tokens, weight).backward(grad)
    wide = torch.promote_types(dtype, torch.float32)
    want = torch.zeros(7, 300, dtype=wide)
    for token, row in zip(tokens.flatten().tolist(), grad.flatten(0, 1), strict=True):
        want[token] += row.to(wide)
    assert weight.grad is not None
    assert torch.equal(weight.grad, want.to(dtype))


def test_a_label_outside_the_vocabulary_is_named(form):
    with pytest.raises(IndexError, match="1 labels lie outside the vocabulary of 5"):
        invariant.cross_entropy(torch.randn(2, 5), torch.tensor([1, 5]))


def test_ignored_rows_have_neither_loss_nor_gradient(form):
    x = torch.randn(3, 5, requires_grad=True)
    losses = invariant.cross_entropy(x, torch.tensor([1, -100, 2]))
    invariant.sum(losses).backward()
    assert losses[1] == 0
    assert x.grad is not None
    assert not x.grad[1].any()
    assert x.grad[0].any()
