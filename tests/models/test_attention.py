"""Each way to compute attention against the definition in fp64, and the choice among them."""

import math

import pytest
import torch
import transformers
from tests.models.hf_reference import LLAMA, hf_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drumline.models import Rope, select
from drumline.models.rope import rotate, tables
from drumline.recipe.errors import DrumlineError
from drumline.recipe.sections import Model, RopeScaling

SHAPE = LLAMA  # 4 query heads, 2 key/value heads of width 16
DOCUMENTS = torch.tensor([[0] * 13 + [13] * 1 + [14] * 36, [0] * 50], dtype=torch.int32)


def inputs(dtype, num_tokens=50):
    generator = torch.Generator().manual_seed(0)
    heads = (SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads)
    return [
        torch.randn(2, num_tokens, n, SHAPE.head_dim, generator=generator).to(dtype).requires_grad_() for n in heads
    ]


def definition(q, k, v, rope, starts):
    """softmax(q k / sqrt(K)) v in fp64 with a dense mask, the rotation as a product of complex numbers."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    turn = torch.complex(rope.cos_TK2.double(), rope.sin_TK2.double())[:, None]

    def turned(x):
        a, b = x.chunk(2, -1)
        z = torch.complex(a, b) * turn
        return torch.cat((z.real, z.imag), -1)

    group = q.shape[2] // k.shape[2]
    keys, values = turned(k).repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihk,bjhk->bhij", turned(q), keys) / math.sqrt(q.shape[-1])
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(q.shape[1])
    is_seen = (j <= i).expand(q.shape[0], -1, -1)
    if starts is not None:
        is_seen = is_seen & (j >= starts[:, :, None])
    probabilities = scores.masked_fill(~is_seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhk->bihk", probabilities, values), (q, k, v)


def error_of(kind, dtype, starts):
    """Largest relative error of the result and of each gradient."""
    attend, _ = select(kind, "cpu")
    q, k, v = inputs(dtype)
    rope = tables(SHAPE, q.shape[1], "cpu")
    prepare = getattr(attend, "prepare", None)
    out = attend(q, k, v, rope, starts if starts is None or prepare is None else prepare(starts, dtype))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    expected, leaves = definition(q, k, v, rope, starts)
    actual = (out, *torch.autograd.grad(out, (q, k, v), grad.to(dtype)))
    wanted = (expected, *torch.autograd.grad(expected, leaves, grad.to(dtype).double()))
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(actual, wanted, strict=True))


KINDS = [("sdpa", torch.float64, 1e-14)]
KINDS += [
    (kind, dtype, limit)
    for kind in ("sdpa", "kernel")
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3))
]


@pytest.mark.parametrize(("kind", "dtype", "limit"), KINDS)
@pytest.mark.parametrize("starts", [None, DOCUMENTS], ids=["causal", "documents"])
def test_result_and_gradients_equal_the_definition_in_fp64(kind, dtype, limit, starts):
    if kind == "kernel":
        kernels = pytest.importorskip("drumline.numerics.kernels")
        if kernels.reason():
            pytest.skip(kernels.reason())
    assert error_of(kind, dtype, starts) < limit


def test_a_document_is_computed_as_if_it_were_alone():
    attend, _ = select("sdpa", "cpu")
    q, k, v = inputs(torch.float64)
    rope = tables(SHAPE, 50, "cpu")
    packed = attend(q, k, v, rope, attend.prepare(DOCUMENTS, torch.float64))
    late = Rope(rope.cos_TK2[14:], rope.sin_TK2[14:])
    alone = attend(q[:, 14:], k[:, 14:], v[:, 14:], late, None)
    assert torch.allclose(packed[0, 14:], alone[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("original", [64, 8192])
def test_llama_3_1_scaled_frequencies_equal_those_of_transformers(factor, original):
    model = Model(
        head_dim=128, dim=4096, num_heads=32, rope_scaling=RopeScaling(factor=factor, original_max_seq_len=original)
    )
    config = hf_model(model.model_copy(update={"num_layers": 1, "dim": 32, "hidden_dim": 8, "vocab_size": 8})).config
    frequency, scale = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    rope = tables(model, 4096, "cpu")
    angle = torch.arange(4096).float()[:, None] * frequency
    assert scale == 1.0
    assert torch.equal(rope.cos_TK2, angle.cos())
    assert torch.equal(rope.sin_TK2, angle.sin())


def test_rotation_equals_that_of_transformers():
    q, k, _ = inputs(torch.float32)
    rope = tables(SHAPE, 50, "cpu")
    cos, sin = (torch.cat((x, x), -1)[None] for x in (rope.cos_TK2, rope.sin_TK2))
    apply = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    expected = apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    for ours, theirs in zip((rotate(q, rope), rotate(k, rope)), expected, strict=True):
        assert torch.allclose(ours.transpose(1, 2), theirs, rtol=0, atol=1e-6)


def test_far_positions_are_told_apart_in_bf16():
    rope = tables(SHAPE, 4096, "cpu")
    x = torch.ones(1, 4096, 1, SHAPE.head_dim, dtype=torch.bfloat16)
    turned = rotate(x, rope)
    assert not torch.equal(turned[0, 4001], turned[0, 4002])


def test_the_choice_says_what_it_is_and_falls_back_in_words(monkeypatch):
    kernels = pytest.importorskip("drumline.numerics.kernels")
    assert select("sdpa", "cpu")[1] == "attention: torch SDPA, as asked"
    monkeypatch.setattr(kernels, "reason", lambda: "no C++ compiler was found")
    assert select("auto", "cpu")[1] == "attention: torch SDPA (drumline's CPU kernel: no C++ compiler was found)"
    with pytest.raises(DrumlineError, match=r"'kernel' cannot run here: drumline's CPU kernel: no C\+\+ compiler"):
        select("kernel", "cpu")
    monkeypatch.setattr(kernels, "reason", lambda: None)
    assert select("auto", "cpu")[1] == "attention: drumline's CPU kernel"


@pytest.mark.parametrize(("kind", "device"), [("flex", "cpu"), ("kernel", "cuda")])
def test_what_a_device_cannot_do_is_refused_with_a_remedy(kind, device):
    with pytest.raises(DrumlineError, match=r"try: model\.attention=auto"):
        select(kind, device)
