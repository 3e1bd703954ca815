"""Latent attention against a formula in fp64 written here, head by head, and against transformers' DeepSeek-V3."""

import cmath
import math

import pytest
import torch
import torch.nn.functional as F
from tests.models.deepseek_reference import DEEPSEEK, YARN, hf_config, hf_state, hf_twin, with_mla
from tests.models.hf_reference import make, random_tokens
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from drumline.models import latent_attention, rope
from drumline.models.attention import KernelAttend, SdpaAttend
from drumline.models.latent_attention import LatentAttention
from drumline.models.rope import tables
from drumline.numerics import kernels

WITH_YARN = DEEPSEEK.model_copy(update={"yarn": YARN})
SHAPES = {
    "with a latent of queries": DEEPSEEK,
    "without": with_mla(q_lora_rank=0),
    "yarn": WITH_YARN,
    "values as wide as keys": with_mla(v_head_dim=24),
    "all but two elements turn": with_mla(qk_nope_head_dim=2, qk_rope_head_dim=30),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES)
B, T = 2, 50
STARTS = torch.tensor([[0] * 50, [0] * 17 + [17] * 3 + [20] * 30], dtype=torch.int32)


def relative(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def frequencies(model):
    """Of each rotary pair, by the papers; YaRN's bounds and ramp."""
    R, yarn = model.mla.qk_rope_head_dim, model.yarn
    found = [model.rope_theta ** (-2 * i / R) for i in range(R // 2)]
    if yarn is None:
        return found

    def bound(turns):
        return R * math.log(yarn.original_max_seq_len / (2 * math.pi * turns)) / (2 * math.log(model.rope_theta))

    low, high = max(math.floor(bound(yarn.beta_fast)), 0), min(math.ceil(bound(yarn.beta_slow)), R - 1)
    ramp = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(R // 2)]
    return [f * (1 - share) + f / yarn.factor * share for f, share in zip(found, ramp, strict=True)]


def turned(x_TR, model):
    """Each pair (i, i + R/2) as a complex number, times e^(i t f)."""
    half = x_TR.shape[1] // 2
    pairs = torch.complex(x_TR[:, :half], x_TR[:, half:])
    unit = torch.tensor([[cmath.exp(1j * t * f) for f in frequencies(model)] for t in range(len(x_TR))])
    pairs = pairs * unit.to(torch.complex128)
    grown = magnitude(model, "mscale") / magnitude(model, "mscale_all_dim")
    return torch.cat((pairs.real, pairs.imag), dim=1) * grown


def magnitude(model, key):
    return 1.0 if model.yarn is None else 0.1 * getattr(model.yarn, key) * math.log(model.yarn.factor) + 1.0


def norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def formula(weights, x_BTD, starts_BT, model):
    """DeepSeek-V2's equations 37 to 47 for each sequence, head and query."""
    mla, H = model.mla, model.num_heads
    nope, R = mla.qk_nope_head_dim, mla.qk_rope_head_dim
    scale = magnitude(model, "mscale_all_dim") ** 2 / math.sqrt(nope + R)
    rows = []
    for x_TD, starts_T in zip(x_BTD, starts_BT.tolist(), strict=True):
        if mla.q_lora_rank:
            queries = norm(x_TD @ weights["q_a_proj.weight"].T, weights["q_a_norm.weight"], model.norm_eps)
            queries = queries @ weights["q_b_proj.weight"].T
        else:
            queries = x_TD @ weights["q_proj.weight"].T
        compressed = x_TD @ weights["kv_a_proj.weight"].T
        latent = norm(compressed[:, : mla.kv_lora_rank], weights["kv_a_norm.weight"], model.norm_eps)
        rotary_key = turned(compressed[:, mla.kv_lora_rank :], model)
        heads = []
        for head in range(H):
            q = queries[:, head * (nope + R) : (head + 1) * (nope + R)]
            up = weights["kv_b_proj.weight"][head * (nope + mla.v_head_dim) : (head + 1) * (nope + mla.v_head_dim)]
            scores = scale * (q[:, :nope] @ (latent @ up[:nope].T).T + turned(q[:, nope:], model) @ rotary_key.T)
            value = latent @ up[nope:].T
            out = [scores[i, starts_T[i] : i + 1].softmax(0) @ value[starts_T[i] : i + 1] for i in range(x_TD.shape[0])]
            heads.append(torch.stack(out))
        rows.append(torch.cat(heads, dim=1) @ weights["o_proj.weight"].T)
    return torch.stack(rows)


def module(model, attend, dtype):
    attention = LatentAttention(model, attend, "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            parameter.copy_(around + 0.2 * torch.randn(parameter.shape, generator=generator))
    return attention.to(dtype)


def errors(model, attend, dtype, starts_BT=STARTS):
    """Of the output and of every gradient, against the formula."""
    attention = module(model, attend, dtype)
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(B, T, model.dim, generator=generator, dtype=torch.float64) for _ in range(2))
    ours = x.to(dtype).requires_grad_()
    prepare = getattr(attend, "prepare", None)
    mask = starts_BT if prepare is None else prepare(starts_BT, dtype)
    out = attention(ours, tables(model, T, "cpu"), mask)
    out.backward(grad.to(dtype))
    weights = {name: p.detach().double().requires_grad_() for name, p in attention.named_parameters()}
    x.requires_grad_()
    expected = formula(weights, x, starts_BT, model)
    expected.backward(grad)
    found = {"out": relative(out, expected), "x": relative(ours.grad, x.grad)}
    return found | {name: relative(p.grad, weights[name].grad) for name, p in attention.named_parameters()}


@EVERY_SHAPE
def test_output_and_gradients_are_the_formulas(shape):
    assert max(errors(SHAPES[shape], SdpaAttend(), torch.float64).values()) < 1e-6  # tables are fp32


@EVERY_SHAPE
def test_the_cpu_kernel_computes_the_same(shape):
    if not kernels.available():
        pytest.skip(str(kernels.reason()))
    assert max(errors(SHAPES[shape], KernelAttend(kernels.attention), torch.float32).values()) < 1e-5


def test_bf16_is_near():
    assert max(errors(WITH_YARN, SdpaAttend(), torch.bfloat16).values()) < 3e-2


def a_key_of_each_head(monkeypatch):
    right = torch.Tensor.expand
    monkeypatch.setattr(torch.Tensor, "expand", lambda x, *sizes: right(x, *sizes) * torch.arange(1, 5)[:, None])


def a_scale_of_values_width(monkeypatch):
    right = SdpaAttend.__call__
    grow = math.sqrt(24 / 12)
    monkeypatch.setattr(SdpaAttend, "__call__", lambda self, q, *rest: right(self, grow * q, *rest))


def no_magnitudes(monkeypatch):
    monkeypatch.setattr(rope, "_magnitudes", lambda yarn: (1.0, 1.0))


def magnitude_of_the_rotated_part_alone(monkeypatch):
    right = rope._magnitudes
    monkeypatch.setattr(rope, "_magnitudes", lambda yarn: (math.prod(right(yarn)), 1.0))


def frequencies_that_yarn_leaves(monkeypatch):
    monkeypatch.setattr(rope, "_yarn", lambda frequency, theta, yarn: frequency)


def parts_laid_out_one_after_the_other(monkeypatch):
    monkeypatch.setattr(latent_attention, "pair_halves", lambda *parts: torch.cat(parts, dim=-1))


def values_of_the_filled_end(monkeypatch):
    right = F.pad
    monkeypatch.setattr(F, "pad", lambda x, sizes: right(x, sizes[::-1]))


@pytest.mark.parametrize(
    "fault",
    [
        a_key_of_each_head,
        a_scale_of_values_width,
        no_magnitudes,
        magnitude_of_the_rotated_part_alone,
        frequencies_that_yarn_leaves,
        parts_laid_out_one_after_the_other,
        values_of_the_filled_end,
    ],
)
def test_the_formula_catches_a_fault(fault, monkeypatch):
    fault(monkeypatch)
    assert errors(WITH_YARN, SdpaAttend(), torch.float64)["out"] > 1e-3


def test_the_gradient_of_the_shared_rotary_key_is_a_sum_over_heads():
    """What a layout that spreads heads has to sum over ranks."""
    attention = module(DEEPSEEK, SdpaAttend(), torch.float64)
    shares = []
    x = torch.randn(1, T, DEEPSEEK.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for heads in (slice(0, 2), slice(2, 4), slice(0, 4)):
        part = LatentAttention(DEEPSEEK.model_copy(update={"num_heads": heads.stop - heads.start}), SdpaAttend(), "cpu")
        part = part.double()
        state = attention.state_dict()
        cut = {
            "q_b_proj.weight": state["q_b_proj.weight"].unflatten(0, (4, -1))[heads].flatten(0, 1),
            "kv_b_proj.weight": state["kv_b_proj.weight"].unflatten(0, (4, -1))[heads].flatten(0, 1),
            "o_proj.weight": state["o_proj.weight"].unflatten(1, (4, -1))[:, heads].flatten(1),
        }
        part.load_state_dict(state | cut)
        part(x, tables(DEEPSEEK, T, "cpu"), None).sum().backward()
        shares.append(part.kv_a_proj.weight.grad[-8:])
    assert relative(shares[0] + shares[1], shares[2]) < 1e-12
    assert relative(shares[0], shares[2]) > 0.1


@EVERY_SHAPE
def test_logits_equal_those_of_transformers(shape):
    decoder = make(SHAPES[shape])
    tokens_BT = random_tokens(2, 100, 101)
    with torch.no_grad():
        assert relative(decoder(tokens_BT), hf_twin(decoder)(tokens_BT).logits) < 5e-6


@EVERY_SHAPE
def test_loss_and_gradients_equal_those_of_transformers(shape):
    decoder = make(SHAPES[shape], dtype=torch.float64, loss_chunk_tokens=64)
    twin = hf_twin(decoder)
    tokens_BT = random_tokens(2, 101, 101)
    loss = decoder(tokens_BT[:, :-1], labels_BT=tokens_BT[:, 1:])
    logits = twin(tokens_BT[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten(), reduction="sum")
    loss.backward()
    expected.backward()
    assert relative(loss, expected) < 1e-6
    theirs = {name: parameter.grad for name, parameter in twin.named_parameters()}
    ours = hf_state({name: parameter.grad for name, parameter in decoder.named_parameters()})
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert relative(gradient, theirs[name]) < 1e-6, name  # transformers' router is fp32 always


@pytest.mark.parametrize(
    "yarn", [YARN, YARN.model_copy(update={"factor": 1.0}), YARN.model_copy(update={"beta_fast": 32.0})]
)
def test_yarns_tables_are_those_of_transformers(yarn):
    model = DEEPSEEK.model_copy(update={"yarn": yarn})
    theirs = DeepseekV3RotaryEmbedding(hf_config(model))
    cos, sin = theirs(torch.zeros(1), torch.arange(T)[None])
    ours, still = tables(model, T, "cpu"), model.mla.qk_nope_head_dim // 2
    grown = magnitude(model, "mscale_all_dim")
    assert torch.equal(ours.sin_TK2[:, :still], torch.zeros(T, still))
    assert relative(ours.cos_TK2[:, :still], torch.full((T, still), grown)) < 1e-7
    assert relative(ours.cos_TK2[:, still:], grown * cos[0, :, :4]) < 1e-6
    assert relative(ours.sin_TK2[:, still:], grown * sin[0, :, :4]) < 1e-6
