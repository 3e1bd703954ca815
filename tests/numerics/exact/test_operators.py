"""Operators of fixed pieces against torch in fp64, and their bits where only some of the pieces are there."""

import functools

import pytest
import torch
import torch.nn.functional as F

from drumline.numerics.exact import (
    chunked,
    column_blocks,
    column_gradient,
    cut_rows,
    in_blocks,
    joined_blocks,
    mirrored,
    product,
    products,
    rms_norm,
    rms_norm_gradients,
    row_blocks,
    row_gradients,
    spread_product,
    summed_product,
    swiglu,
    unchunked,
)
from drumline.numerics.exact.experts import ExpertGradients, Run, Weights, expert_rows, expert_rows_backward, runs_of
from drumline.numerics.exact.vocabulary import gradient_, losses, masses, merged
from drumline.numerics.kernels.leaves import matmul_leaves
from drumline.numerics.tree import tree_sum


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("rows", [1, 3])
def test_chunks_and_blocks_are_put_together_again(rows):
    x_BTN = normal(rows, 24, 6)
    assert torch.equal(unchunked(chunked(x_BTN, 8), rows), x_BTN)
    assert torch.equal(chunked(x_BTN, 8)[5].view(rows, 3, 6), x_BTN[:, 15:18])
    assert torch.equal(joined_blocks(in_blocks(chunked(x_BTN, 8), 2)), chunked(x_BTN, 8))
    weights = [normal(8, 3), normal(4, 3)]
    for found, weight in zip(cut_rows(row_blocks(weights, 4), [8, 4]), weights, strict=True):
        assert torch.equal(found, weight)


def test_mirrored_chunks_are_neighbours_in_the_sum():
    assert mirrored(range(8), 8) == [0, 7, 1, 6, 2, 5, 3, 4]
    assert mirrored((2, 3, 4, 5), 8) == [0, 3, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_products_are_those_of_torch(dtype):
    x_CRK, one_NK, two_NK = normal(4, 5, 12), normal(16, 12, seed=1), normal(8, 12, seed=3)
    down_ON, order = normal(7, 16, seed=2), [0, 3, 1, 2]
    inputs = [each.to(dtype) for each in (x_CRK, one_NK, two_NK, down_ON)]
    y_CRN, z_CRN = (spread_product(inputs[0], weight, 4) for weight in inputs[1:3])
    close = functools.partial(torch.testing.assert_close, check_dtype=False, rtol=1e-5, atol=1e-5)
    close(y_CRN, (x_CRK @ one_NK.T).to(dtype))
    close(summed_product([y_CRN], [inputs[3].t()], 4), (x_CRK @ one_NK.T @ down_ON.T).to(dtype))
    both = x_CRK @ one_NK.T @ one_NK + x_CRK @ two_NK.T @ two_NK
    close(summed_product([y_CRN, z_CRN], inputs[1:3], 4), both.to(dtype))
    rows = x_CRK.flatten(0, 1)
    for found, weight_NK in zip(row_gradients([y_CRN, z_CRN], inputs[0], order, 4), (one_NK, two_NK), strict=True):
        close(found, (weight_NK @ rows.T @ rows).to(dtype))
    close(column_gradient(inputs[0], y_CRN, order, 4), (rows.T @ rows @ one_NK.T).to(dtype))


def without_kernels(monkeypatch):
    monkeypatch.setattr(products, "library", lambda *_: None)


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width", "hidden"), [(5, 24, 20), (7, 690, 36), (33, 40, 172), (1, 64, 64)])
def test_products_keep_their_bits_where_a_rank_has_some_of_the_pieces(rows, width, hidden, dtype, plain, monkeypatch):
    if plain:
        without_kernels(monkeypatch)
    x_CRK, weight_NK = normal(8, rows, width, dtype=dtype), normal(hidden, width, dtype=dtype, seed=1)
    down_ON, n = normal(width, hidden, dtype=dtype, seed=2), hidden // 4
    whole = spread_product(x_CRK, weight_NK, 4)
    order = mirrored(range(8), 8)
    gradient, other = row_gradients([whole], x_CRK, order, 4)[0], column_gradient(x_CRK, whole, order, 4)
    partials = []
    for first, last in ((0, 1), (1, 2), (2, 4)):
        own, num = slice(first * n, last * n), last - first
        weight_nK, y_CRn = weight_NK[own].clone(), whole[..., own].contiguous()
        assert torch.equal(spread_product(x_CRK[3:6], weight_nK, num), y_CRn[3:6])
        assert torch.equal(row_gradients([y_CRn], x_CRK, order, num)[0], gradient[own])
        assert torch.equal(column_gradient(x_CRK, y_CRn, order, num), other[:, own])
        partials.append(summed_product([y_CRn[3:6]], [down_ON[:, own].clone().t()], num))
    summed = summed_product([whole], [down_ON.t()], 4)
    assert torch.equal((partials[0] + partials[1]) + partials[2], summed[3:6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_leaves", [1, 2, 3, 5, 8])
def test_the_tree_of_products_is_the_tree_of_single_ones(num_leaves, dtype):
    """Over several tiles of the kernel, and parts of them."""
    pairs = [
        (normal(600, 40, dtype=dtype, seed=i), normal(300, 40, dtype=dtype, seed=9 + i)) for i in range(num_leaves)
    ]
    expected = tree_sum([product(a_MK, b_NK) for a_MK, b_NK in pairs], num_leaves)
    built = products.library(products.matmul, pairs[0][0])
    if built is None:
        pytest.skip("no kernels here")
    assert torch.equal(matmul_leaves(built, [[pair] for pair in pairs], torch.float32), expected)
    part = [[(a_MK[77:590], b_NK[3:280])] for a_MK, b_NK in pairs]
    assert torch.equal(matmul_leaves(built, part, torch.bfloat16), expected[77:590, 3:280].bfloat16())


def test_a_norm_and_its_gradients_are_those_of_torch():
    x_CRD, weight_D, grad_CRD = normal(4, 3, 10).requires_grad_(), normal(10, seed=1).requires_grad_(), normal(4, 3, 10)
    y_CRD, r_CR1 = rms_norm(x_CRD.detach(), weight_D.detach(), 1e-5)
    expected = F.rms_norm(x_CRD, (10,), weight_D, 1e-5)
    torch.testing.assert_close(y_CRD, expected.detach())
    wanted = torch.autograd.grad(expected, (x_CRD, weight_D), grad_CRD)
    grad_x, leaves_CD = rms_norm_gradients(grad_CRD, x_CRD.detach(), weight_D.detach(), r_CR1)
    torch.testing.assert_close(grad_x, wanted[0])
    torch.testing.assert_close(leaves_CD.sum(0), wanted[1])


def test_swiglu_and_its_gradients_are_those_of_torch():
    gate, up = normal(3, 7).mul_(4).requires_grad_(), normal(3, 7, seed=1).requires_grad_()
    gate.data[0, :3] = torch.tensor([-1e4, 1e4, 0.0])
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)
    grads, wanted = (
        torch.autograd.grad(f(gate, up).square().sum(), (gate, up)) for f in (swiglu, lambda g, u: F.silu(g) * u)
    )
    torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swiglu_keeps_its_bits_at_any_place(dtype):
    gate, up = normal(1000, dtype=dtype), normal(1000, dtype=dtype, seed=1)
    whole = swiglu(gate, up)
    for start, stop in ((0, 16), (3, 51), (17, 18), (500, 997)):
        assert torch.equal(swiglu(gate[start:stop], up[start:stop]), whole[start:stop])


def test_the_loss_of_blocks_is_the_cross_entropy_of_torch():
    logits_RV = (3 * normal(6, 20)).requires_grad_()
    labels_R = torch.tensor([0, 4, 5, 19, 12, 7])
    blocks = [logits_RV.detach()[:, start : start + 5].clone() for start in range(0, 20, 5)]
    places = [(labels_R - start).clamp(0, 4) for start in range(0, 20, 5)]
    here = [(labels_R >= start) & (labels_R < start + 5) for start in range(0, 20, 5)]
    found = merged([masses(*block) for block in zip(blocks, places, here, strict=True)])
    losses_R, lse_R = losses(found)
    expected_R = F.cross_entropy(logits_RV, labels_R, reduction="none")
    torch.testing.assert_close(losses_R, expected_R.detach())
    (wanted,) = torch.autograd.grad(expected_R.sum(), logits_RV)
    parts = [gradient_(block, lse_R, *where) for block, *where in zip(blocks, places, here, strict=True)]
    torch.testing.assert_close(torch.cat(parts, dim=1), wanted)


def test_experts_and_their_gradients_are_those_of_torch():
    gate, up, down = (normal(3, *shape, seed=seed) for seed, shape in enumerate([(8, 6), (8, 6), (6, 8)]))
    gate_up = torch.cat([weight.unflatten(1, (4, -1)) for weight in (gate, up)], dim=2)
    weights = Weights(gate_up, torch.stack([column_blocks(each, 4) for each in down]))
    runs = runs_of([[[2, 0, 1], [1, 0, 3]]], [0], [(0, 1)])
    assert [(run.expert, run.chunk, run.rows) for run in runs] == [
        (0, 0, slice(0, 2)),
        (0, 1, slice(2, 3)),
        (2, 0, slice(3, 4)),
        (2, 1, slice(4, 7)),
    ]
    rows_QD, grad_QD = normal(7, 6), normal(7, 6, seed=4)
    y_QD, gate_up_bQF = expert_rows(rows_QD, weights, runs)
    gradients = ExpertGradients(weights, {0: [0, 1]})
    grad_rows = expert_rows_backward(grad_QD, rows_QD, gate_up_bQF, weights, runs, gradients)
    ((sender, found),) = gradients.take()
    assert sender == 0

    leaves = [x.requires_grad_() for x in (rows_QD, gate, up, down)]
    parts = []
    for expert, rows in ((0, slice(0, 3)), (2, slice(3, 7))):
        x = rows_QD[rows]
        parts.append((F.silu(x @ gate[expert].T) * (x @ up[expert].T)) @ down[expert].T)
    expected = torch.cat(parts)
    torch.testing.assert_close(y_QD, expected.detach())
    wanted = torch.autograd.grad(expected, leaves, grad_QD)
    torch.testing.assert_close(grad_rows, wanted[0])
    own_gate, own_up = (half.flatten(1, 2) for half in found.gate_up_EbFD.chunk(2, dim=2))
    for grad, want in zip((own_gate, own_up, found.down_EbDF.movedim(1, 2).flatten(2)), wanted[1:], strict=True):
        torch.testing.assert_close(grad, want)


def test_experts_keep_gradients_of_senders_apart():
    weights = Weights(normal(1, 2, 4, 6), normal(1, 2, 6, 2))
    gradients = ExpertGradients(weights, {0: [0], 1: [0]})
    rows_QD = normal(4, 6)
    runs = [Run(0, 0, 0, slice(0, 3)), Run(1, 0, 0, slice(3, 4))]
    _, kept = expert_rows(rows_QD, weights, runs)
    expert_rows_backward(normal(4, 6, seed=1), rows_QD, kept, weights, runs, gradients)
    both = dict(gradients.take())
    alone = ExpertGradients(weights, {1: [0]})
    runs = [Run(1, 0, 0, slice(0, 1))]
    _, kept = expert_rows(rows_QD[3:], weights, runs)
    expert_rows_backward(normal(4, 6, seed=1)[3:], rows_QD[3:], kept, weights, runs, alone)
    for found, expected in zip(both[1], dict(alone.take())[1], strict=True):
        torch.testing.assert_close(found, expected)
