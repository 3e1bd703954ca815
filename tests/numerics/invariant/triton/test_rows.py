"""Row operators in Triton: right against fp64, and the same bits whatever surrounds a row."""

import pytest
import torch
import torch.nn.functional as F
from tests.numerics.invariant.triton.here import IS_INTERPRETED

from drumline.numerics import invariant

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def normal(*shape, dtype, device):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def weight_of(x):
    return torch.linspace(0.5, 1.5, x.shape[-1]).to(x.device)


def labels_of(x):
    return torch.arange(x.shape[0], device=x.device) % x.shape[-1]


CASES = {
    "softmax": (invariant.softmax, lambda x: F.softmax(x, -1)),
    "log_softmax": (invariant.log_softmax, lambda x: F.log_softmax(x, -1)),
    "sum": (lambda x: invariant.sum(x, -1), lambda x: x.sum(-1)),
    "mean": (lambda x: invariant.mean(x, -1), lambda x: x.mean(-1)),
    "swiglu": (lambda x: invariant.swiglu(x, x.flip(-1)), lambda x: F.silu(x) * x.flip(-1)),
    "rms_norm": (
        lambda x: invariant.rms_norm(x, weight_of(x), 1e-5),
        lambda x: F.rms_norm(x, x.shape[-1:], weight_of(x).to(x.dtype), 1e-5),
    ),
    "cross_entropy": (
        lambda x: invariant.cross_entropy(x, labels_of(x)),
        lambda x: F.cross_entropy(x, labels_of(x), reduction="none"),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5, 77, 1500])
@pytest.mark.parametrize("name", list(CASES))
def test_results_and_gradients_match_torch_in_fp64(name, width, dtype, device):
    own, torchs = CASES[name]
    x = normal(13, width, dtype=dtype, device=device).requires_grad_()
    y = own(x)
    x64 = x.detach().double().requires_grad_()
    y64 = torchs(x64)
    seed = normal(*y.shape, dtype=y.dtype, device=device)
    (grad,), (grad64,) = torch.autograd.grad(y, x, seed), torch.autograd.grad(y64, x64, seed.double())
    for got, want in ((y, y64), (grad, grad64)):
        assert (got - want).abs().max() <= TOLERANCE[dtype] * max(1e-2, want.abs().max().item())
    assert grad.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if name != "cross_entropy"])
@pytest.mark.parametrize("width", [1, 31, 1500])
def test_a_row_alone_has_the_bits_that_it_has_among_others(name, width, dtype, device):
    own = CASES[name][0]
    x = normal(37, width, dtype=dtype, device=device)
    whole = own(x.requires_grad_())
    seed = normal(*whole.shape, dtype=whole.dtype, device=device)
    (grad,) = torch.autograd.grad(whole, x, seed)
    for first, last in ((0, 1), (5, 6), (7, 20), (36, 37)):
        # A view, not a clone: it begins at another alignment.
        part = x.detach()[first:last].requires_grad_()
        y = own(part)
        assert torch.equal(y, whole[first:last])
        assert torch.equal(torch.autograd.grad(y, part, seed[first:last])[0], grad[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_loss_and_its_gradient_do_not_depend_on_the_other_rows(dtype, device):
    x, labels = normal(37, 1500, dtype=dtype, device=device), torch.arange(37, device=device)
    losses, gradient = invariant.cross_entropy_with_gradient(x, labels, -100)
    for first, last in ((0, 1), (5, 6), (7, 20), (36, 37)):
        part = invariant.cross_entropy_with_gradient(x[first:last], labels[first:last], -100)
        assert torch.equal(part[0], losses[first:last])
        assert torch.equal(part[1], gradient[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norms_weight_gradient_matches_fp64_over_several_blocks_of_rows(dtype, device):
    x, seed = (normal(200, width, dtype=dtype, device=device) for width in (77, 77))
    weight = weight_of(x).requires_grad_()
    (grad,) = torch.autograd.grad(invariant.rms_norm(x, weight, 1e-5), weight, seed.flip(0))
    weight64 = weight.detach().to(dtype).double().requires_grad_()
    y64 = F.rms_norm(x.double(), (77,), weight64, 1e-5)
    (grad64,) = torch.autograd.grad(y64, weight64, seed.flip(0).double())
    assert (grad - grad64).abs().max() <= 1e-5 * grad64.abs().max()


def test_a_norms_weight_gradient_adds_each_block_of_64_rows_as_a_chain(device):
    """An oracle for the order: 2^24 swallows a one that is added to it, but not the sum of ones before it."""
    x = torch.ones(66, 1, device=device)
    grad = torch.ones(66, 1, device=device)
    grad[0] = 2.0**24
    weight = torch.ones(1, device=device).requires_grad_()
    (got,) = torch.autograd.grad(invariant.rms_norm(x, weight, 1e-30), weight, grad)
    assert got.item() == 2.0**24 + 2.0  # the 63 ones of the first block are lost one by one, the two of the second kept


@pytest.mark.parametrize("width", [1, 5, 16_384, 40_000])
def test_a_long_sum_matches_fp64_and_has_the_same_bits_beside_others(width, device):
    x = normal(3, width, dtype=torch.float32, device=device)
    whole = invariant.sum(x, -1)
    assert (whole - x.double().sum(-1)).abs().max() <= 1e-6 * x.abs().sum(-1).max()
    for row in range(3):
        assert torch.equal(invariant.sum(x[row]), whole[row])
        assert torch.equal(invariant.sum(x[row].unsqueeze(0), -1)[0], whole[row])


def test_sums_over_each_dim_match_torch(device):
    x = normal(5, 170, 9, dtype=torch.float32, device=device)
    for dim in (0, 1, 2, -1, -2, None):
        for keepdim in (False, True):
            want = x.double().sum() if dim is None else x.double().sum(dim, keepdim)
            want = want.reshape(1, 1, 1) if dim is None and keepdim else want
            got = invariant.sum(x, dim, keepdim)
            assert got.shape == want.shape
            assert (got - want).abs().max() <= 1e-4


def test_a_sum_over_rows_may_be_split_by_columns(device):
    x = normal(300, 300, dtype=torch.float32, device=device)
    whole = invariant.sum(x, 0)
    for first, last in ((0, 1), (3, 36), (17, 297)):
        assert torch.equal(invariant.sum(x[:, first:last], 0), whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_embedding_adds_a_tokens_occurrences_in_their_order(dtype, device):
    tokens = torch.randint(0, 7, (5, 40), generator=torch.Generator().manual_seed(1))
    tokens[tokens == 3] = 4  # one row of the table has no token
    weight = normal(7, 300, dtype=dtype, device=device).requires_grad_()
    grad = normal(5, 40, 300, dtype=dtype, device=device)
    invariant.embedding(tokens.to(device), weight).backward(grad)
    want = torch.zeros(7, 300, device=device)
    for token, row in zip(tokens.flatten().tolist(), grad.flatten(0, 1), strict=True):
        want[token] += row.float()
    assert weight.grad is not None
    if IS_INTERPRETED and dtype == torch.bfloat16:  # the interpreter cuts bits off where a GPU rounds
        torch.testing.assert_close(weight.grad, want.to(dtype), rtol=2**-7, atol=0)
    else:
        assert torch.equal(weight.grad, want.to(dtype))


def test_a_label_outside_the_vocabulary_is_named(device):
    with pytest.raises(IndexError, match="1 labels lie outside the vocabulary of 5"):
        invariant.cross_entropy(torch.randn(2, 5, device=device), torch.tensor([1, 5], device=device))


def test_ignored_rows_have_neither_loss_nor_gradient(device):
    x = torch.randn(3, 5, device=device, requires_grad=True)
    losses = invariant.cross_entropy(x, torch.tensor([1, -100, 2], device=device))
    invariant.sum(losses).backward()
    assert losses[1] == 0
    assert x.grad is not None
    assert not x.grad[1].any()
    assert x.grad[0].any()
