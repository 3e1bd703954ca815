"""Attention over some of the keys, and the merge, against softmax over all of them."""

import math

import pytest
import torch

from drumline.parallel.context import partial
from drumline.parallel.context.partial import attend_part, attend_part_backward, merge_

BATCH, HEADS, KV_HEADS, ROWS, WIDTH = 2, 4, 2, 6, 16


def tensors(num_columns, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, ROWS), (KV_HEADS, num_columns), (KV_HEADS, num_columns), (HEADS, ROWS))
    return [torch.randn(BATCH, n, t, WIDTH, generator=generator).to(dtype) for n, t in shapes]


def some_mask(num_columns):
    """Row 2 of the first sequence sees nothing of the first columns."""
    mask = torch.rand(BATCH, ROWS, num_columns, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[0, 2, :5] = False
    mask[:, :, -1] = True
    return mask


def whole(q, k, v, mask):
    group = HEADS // KV_HEADS
    scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(WIDTH)
    scores = scores.masked_fill(~mask[:, None], -math.inf)
    return scores.softmax(-1) @ v.repeat_interleave(group, 1), scores.logsumexp(-1)


DTYPES = [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("slab", [partial._MAX_SCORES, 1], ids=["whole", "row by row"])
def test_merged_parts_and_their_gradients_are_the_whole(dtype, limit, slab, monkeypatch):
    monkeypatch.setattr(partial, "_MAX_SCORES", slab)
    q, k, v, grad = tensors(12, dtype)
    mask = some_mask(12)
    wide = torch.promote_types(dtype, torch.float32)
    out, lse = torch.zeros(q.shape, dtype=wide), torch.full(q.shape[:3], -math.inf, dtype=wide)
    parts = [slice(0, 5), slice(5, 6), slice(6, 12)]
    for part in parts:
        merge_(out, lse, *attend_part(q, k[:, :, part], v[:, :, part], mask[:, :, part], False))

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = whole(*leaves, mask)
    assert torch.allclose(out.double(), expected, atol=limit, rtol=0)
    assert torch.allclose(lse.double(), expected_lse, atol=limit, rtol=0)

    shares = [
        attend_part_backward(grad, q, k[:, :, part], v[:, :, part], out.to(dtype), lse, mask[:, :, part], False)
        for part in parts
    ]
    grads = (
        sum(share[0].double() for share in shares),
        torch.cat([share[1] for share in shares], 2).double(),
        torch.cat([share[2] for share in shares], 2).double(),
    )
    for actual, wanted in zip(grads, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        assert (actual - wanted).norm() / wanted.norm() < limit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_that_sees_nothing_weighs_nothing(dtype):
    q, k, v, _ = tensors(6, dtype)
    mask = torch.ones(BATCH, ROWS, 6, dtype=torch.bool)
    mask[0, 2] = False
    mask[1, 0, 0] = False  # under the diagonal this row has nothing left
    out, lse = attend_part(q, k, v, mask, True)
    for row in ((0, slice(None), 2), (1, slice(None), 0)):
        assert torch.equal(out[row], torch.zeros_like(out[row]))
        assert (lse[row] == -math.inf).all()
    assert lse.isfinite().sum() == lse.numel() - 2 * HEADS


def test_merging_nothing_with_nothing_gives_nothing_and_no_nan():
    out, lse = torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -math.inf)
    merge_(out, lse, torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -math.inf))
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -math.inf).all()


def test_large_scores_do_not_overflow_a_merge():
    out, lse = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), 1e4)
    merge_(out, lse, torch.full((1, 1, 1, 1), 3.0), torch.full((1, 1, 1), 1e4))
    assert out.item() == 2.0
    assert lse.item() == pytest.approx(1e4 + math.log(2))


def test_a_nan_of_the_inputs_is_not_hidden():
    q, k, v, _ = tensors(6, torch.float64)
    q[0, 0, 1, 0] = math.nan
    wide = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    merge_(wide, lse, *attend_part(q, k, v, None, False))
    assert wide[0, 0, 1].isnan().all()
    assert wide[0, 0, 2].isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_call_of_the_cuda_kernel_fits_its_schema(is_causal, monkeypatch):
    """Shapes and dtypes only, with tensors that have no data: runs without a device."""
    monkeypatch.setattr(partial, "_runs_flash_cuda", lambda q, mask: True)
    q, k, v, grad = (x.to("meta", torch.bfloat16) for x in tensors(ROWS, torch.float32))
    out, lse = attend_part(q, k, v, None, is_causal)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:3], torch.float32)
    grads = attend_part_backward(grad, q, k, v, out, lse, None, is_causal)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in (q, k, v)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_cuda_kernel_gives_what_the_definition_gives(is_causal):
    q, k, v, grad = (x.to("cuda", torch.bfloat16) for x in tensors(ROWS, torch.float32))
    out, lse = attend_part(q, k, v, None, is_causal)
    exact, exact_lse = attend_part(*(x.double() for x in (q, k, v)), None, is_causal)
    assert torch.allclose(out.double(), exact, atol=2e-2)
    assert torch.allclose(lse.double(), exact_lse, atol=2e-2)
    grads = attend_part_backward(grad, q, k, v, out, lse, None, is_causal)
    wide = (x.double() for x in (grad, q, k, v))
    for actual, wanted in zip(grads, attend_part_backward(*wide, exact, exact_lse, None, is_causal), strict=True):
        assert (actual.double() - wanted).norm() / wanted.norm() < 2e-2
