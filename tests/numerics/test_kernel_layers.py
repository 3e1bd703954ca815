"""RMSNorm, SwiGLU and cross-entropy in C++: against torch in fp64, and against themselves bit for bit."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.numerics.kernels import available, cross_entropy_, layers, loss, reason, rms_norm, swiglu, take
from drumline.numerics.kernels.build import KernelError

pytestmark = pytest.mark.skipif(not available(), reason=f"no kernels here: {reason()}")
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
WIDTHS = st.one_of(st.integers(4, 70), st.sampled_from([256, 768, 1000]))


def with_gradients(compute, leaves, grad):
    out = compute(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype)))


def worst(got, want):
    """The largest error as a share of the largest value (or of 1, if that is larger)."""
    pairs = zip(got, want, strict=True)
    return max((g.double() - w.double()).abs().max().item() / max(1.0, w.abs().max().item()) for g, w in pairs)


@given(rows=st.sampled_from([1, 3, 64, 65, 200]), width=WIDTHS, dtype=DTYPES)
@settings(max_examples=30)
def test_rms_norm_and_its_gradients_match_fp64(rows, width, dtype):
    x, grad = (torch.randn(rows, width).to(dtype) for _ in range(2))
    weight = torch.randn(width).to(dtype).float()
    got = with_gradients(lambda x, w: rms_norm(x, w, 1e-5), [x.requires_grad_(), weight.requires_grad_()], grad)
    wide = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    want = with_gradients(lambda x, w: F.rms_norm(x, (width,), w, 1e-5), wide, grad)
    assert worst(got, want) < LIMIT[dtype]
    assert got[2].dtype == torch.float32


@given(rows=st.sampled_from([1, 3, 64]), width=WIDTHS, dtype=DTYPES, scale=st.sampled_from([1.0, 100.0]))
@settings(max_examples=30)
def test_swiglu_and_its_gradients_match_fp64(rows, width, dtype, scale):
    gate, up, grad = (torch.randn(rows, width).to(dtype) for _ in range(3))
    gate = gate * scale
    got = with_gradients(swiglu, [gate.requires_grad_(), up.requires_grad_()], grad)
    wide = [gate.detach().double().requires_grad_(), up.detach().double().requires_grad_()]
    want = with_gradients(lambda g, u: F.silu(g) * u, wide, grad)
    assert worst(got, want) < LIMIT[dtype]


@given(rows=st.sampled_from([1, 7, 8, 30]), width=st.one_of(st.integers(2, 70), st.just(2048)), dtype=DTYPES)
@settings(max_examples=30)
def test_cross_entropy_and_its_gradient_match_fp64(rows, width, dtype):
    logits = (4 * torch.randn(rows, width)).to(dtype)
    labels = torch.randint(width, (rows,))
    labels[::5] = -100
    wide = logits.double().requires_grad_()
    want = F.cross_entropy(wide, labels, ignore_index=-100, reduction="none")
    want_grad = torch.autograd.grad(want.sum(), wide)[0]
    losses = cross_entropy_(logits, labels, -100, True)
    assert worst([losses], [want.detach()]) < LIMIT[torch.float32]
    assert worst([logits], [want_grad]) < LIMIT[dtype]


def test_cross_entropy_without_gradient_leaves_the_logits():
    logits = torch.randn(5, 33)
    before = logits.clone()
    cross_entropy_(logits, torch.arange(5), -100, False)
    assert torch.equal(logits, before)


def test_cross_entropy_refuses_a_label_outside_the_vocabulary():
    with pytest.raises(IndexError, match="1 labels lie outside the vocabulary of 33"):
        cross_entropy_(torch.randn(3, 33), torch.tensor([0, 33, -100]), -100, True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_is_not_hidden(bad):
    x, weight = torch.randn(4, 40), torch.ones(40)
    x[1, 39] = bad
    assert not rms_norm(x, weight, 1e-5)[1].isfinite().all()
    assert rms_norm(x, weight, 1e-5)[[0, 2, 3]].isfinite().all()
    assert not swiglu(x, x)[1].isfinite().all()
    assert not cross_entropy_(x.clone(), torch.zeros(4, dtype=torch.int64), -100, True)[1].isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_the_other_rows(dtype):
    x, grad = torch.randn(130, 45).to(dtype), torch.randn(130, 45).to(dtype)
    weight = torch.randn(45)
    full = with_gradients(lambda x: rms_norm(x, weight, 1e-5), [x.requires_grad_()], grad)
    part = with_gradients(lambda x: rms_norm(x, weight, 1e-5), [x[67:90].detach().requires_grad_()], grad[67:90])
    assert all(torch.equal(a[67:90], b) for a, b in zip(full, part, strict=True))
    y = swiglu(x, grad)
    assert torch.equal(y[67:90], swiglu(x[67:90], grad[67:90]))
    assert torch.equal(y[67, 3:], swiglu(x[67, 3:], grad[67, 3:]))


THREADS = """
import hashlib, json, torch
from drumline.numerics.kernels import cross_entropy_, rms_norm, swiglu
digests = []
for threads in (1, 2, 5):
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    x, y, grad = (torch.randn((300, 100), generator=generator).requires_grad_() for _ in range(3))
    weight = torch.randn(100, generator=generator).requires_grad_()
    out = [*torch.autograd.grad(rms_norm(x, weight, 1e-5), (x, weight), grad)]
    out += torch.autograd.grad(swiglu(x, y), (x, y), grad)
    logits = x.detach().clone()
    out += [cross_entropy_(logits, torch.arange(300) % 100, -100, True), logits]
    digests.append(hashlib.sha256(b"".join(t.numpy().tobytes() for t in out)).hexdigest())
print(json.dumps(digests))
"""


def test_bits_do_not_depend_on_the_number_of_threads():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120, check=True)
    assert len(set(json.loads(done.stdout))) == 1


def test_the_operators_satisfy_torchs_own_checks():
    ops, x, weight = torch.ops.drumline, torch.randn(3, 5, 40), torch.randn(40)
    scale = ops.rms_norm(x, weight, 1e-5)[1]
    calls = [
        (ops.rms_norm.default, (x, weight, 1e-5)),
        (ops.rms_norm_backward.default, (x, x, weight, scale)),
        (ops.swiglu.default, (x, x)),
        (ops.swiglu_backward.default, (x, x, x)),
        (ops.cross_entropy_.default, (x[0].clone(), torch.arange(5), -100, True)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_only_plain_cpu_tensors_in_fp32_or_bf16_are_taken():
    x = torch.randn(3)
    assert take(x, x.bfloat16(), torch.nn.Parameter(x))
    assert not take(x, x.double())
    assert not take(x.to("meta"))
    assert not take(x.as_subclass(type("Sharded", (torch.Tensor,), {})))


@pytest.mark.parametrize("module", [layers, loss])
def test_a_build_with_wrong_results_is_refused(module):
    class Idle:
        """A library whose functions do nothing."""

        def __getattr__(self, name):
            return lambda *_: 0

    with pytest.raises(KernelError, match=r"(is|are) wrong here"):
        module._check(Idle())
