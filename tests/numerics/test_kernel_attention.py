"""The C++ attention kernel: against dense fp64 attention of torch's own operators, and against itself bit for bit."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ranks import ranks

from drumline.numerics.kernels import attention, available, build, causal_attention, reason

pytestmark = pytest.mark.skipif(not available(), reason=f"no kernels here: {reason()}")
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


def tables(T: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(T, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    return angle.cos().float(), angle.sin().float()


def inputs(B, T, H, G, K, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((B, T, n, K), generator=generator).to(dtype).requires_grad_() for n in (H, G, G)]


def starts_of(lengths: list[int], B: int, T: int) -> torch.Tensor:
    """Documents of the given lengths, again and again; row b begins in the middle of the list."""
    rows = []
    for b in range(B):
        first, row = 0, []
        while len(row) < T:
            length = lengths[(len(row) + b) % len(lengths)]
            row += [first] * length
            first += length
        rows.append(row[:T])
    return torch.tensor(rows, dtype=torch.int32)


def reference(q, k, v, cos, sin, starts):
    """fp64: rotation as a product of complex numbers, attention by torch with an explicit mask."""
    turn = torch.complex(cos.double(), sin.double())[:, None]

    def rotated(x):
        u, w = x.double().chunk(2, dim=-1)
        y = torch.complex(u, w) * turn
        return torch.cat((y.real, y.imag), dim=-1).transpose(1, 2)

    position = torch.arange(q.shape[1])
    mask = (position <= position[:, None])[None]
    if starts is not None:
        mask = mask & (position >= starts[:, :, None])
    out = F.scaled_dot_product_attention(
        rotated(q), rotated(k), v.double().transpose(1, 2), attn_mask=mask[:, None], enable_gqa=True
    )
    return out.transpose(1, 2)


def with_gradients(compute, leaves, grad):
    out = compute(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype)))


def errors(got, want):
    return [((g.double() - w.double()).norm() / w.double().norm()).item() for g, w in zip(got, want, strict=True)]


@given(
    B=st.integers(1, 3),
    T=st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 127, 130, 200])),
    G=st.integers(1, 3),
    group=st.integers(1, 3),
    K=st.one_of(st.sampled_from([16, 32, 64, 128]), st.integers(1, 40).map(lambda n: 2 * n)),
    lengths=st.one_of(st.none(), st.lists(st.integers(1, 90), min_size=1, max_size=4)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=40)
def test_output_and_gradients_match_dense_attention_in_fp64(B, T, G, group, K, lengths, dtype):
    leaves = inputs(B, T, G * group, G, K, dtype)
    grad = torch.randn(B, T, G * group, K).to(dtype)
    cos, sin = tables(T, K)
    starts = None if lengths is None else starts_of(lengths, B, T)
    got = with_gradients(lambda q, k, v: attention(q, k, v, cos, sin, starts), leaves, grad)
    want = with_gradients(lambda q, k, v: reference(q, k, v, cos, sin, starts), leaves, grad)
    # A gradient may be a small difference of large sums (T = 1: dq is 0): the scale is the inputs' where that is
    # larger.
    worst = max(
        (g.double() - w.double()).abs().max().item() / max(1.0, w.abs().max().item())
        for g, w in zip(got, want, strict=True)
    )
    assert worst < 32 * EPS[dtype] if dtype == torch.float32 else worst < 4 * EPS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_against_fp64_is_within_twice_that_of_torchs_attention(dtype):
    leaves = inputs(2, 300, 4, 2, 32, dtype)
    grad = torch.randn(2, 300, 4, 32).to(dtype)
    cos, sin = tables(300, 32)

    def plain(q, k, v):
        def rotated(x):
            u, w = x.chunk(2, dim=-1)
            c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
            return torch.cat((u * c - w * s, w * c + u * s), dim=-1).transpose(1, 2)

        out = F.scaled_dot_product_attention(rotated(q), rotated(k), v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    want = with_gradients(lambda q, k, v: reference(q, k, v, cos, sin, None), leaves, grad)
    own = errors(with_gradients(lambda q, k, v: attention(q, k, v, cos, sin), leaves, grad), want)
    torchs = errors(with_gradients(plain, leaves, grad), want)
    assert all(mine < 2 * theirs for mine, theirs in zip(own, torchs, strict=True)), (own, torchs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_a_fused_projection_give_the_bits_of_contiguous_tensors(dtype):
    B, T, H, G, K = 2, 100, 4, 2, 16
    fused = torch.randn(B, T, (H + 2 * G) * K).to(dtype)
    views = [x.unflatten(-1, (-1, K)) for x in fused.split([H * K, G * K, G * K], dim=-1)]
    cos, sin = tables(T, K)
    grad = torch.randn(B, H, T, K).to(dtype).transpose(1, 2)
    compute = lambda q, k, v: attention(q, k, v, cos, sin)  # noqa: E731
    strided = with_gradients(compute, [x.detach().requires_grad_() for x in views], grad)
    plain = with_gradients(compute, [x.detach().contiguous().requires_grad_() for x in views], grad.contiguous())
    assert not views[0].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))


@pytest.mark.parametrize("lengths", [None, [50, 7, 100]])
def test_a_rows_bits_do_not_depend_on_the_batch_or_on_later_tokens(lengths):
    B, T, H, G, K = 3, 210, 4, 2, 24
    q, k, v = inputs(B, T, H, G, K)
    starts = None if lengths is None else starts_of(lengths, B, T)
    cos, sin = tables(T, K)
    full = attention(q, k, v, cos, sin, starts)
    for b, n in ((1, T), (2, 130), (0, 64), (0, 1)):
        cut = [x[b : b + 1, :n] for x in (q, k, v)]
        part = attention(*cut, cos[:n], sin[:n], None if starts is None else starts[b : b + 1, :n].contiguous())
        assert torch.equal(part, full[b : b + 1, :n])


def test_gradients_of_a_row_do_not_depend_on_the_batch_or_on_other_heads():
    B, T, H, G, K = 3, 150, 6, 3, 16
    leaves, grad = inputs(B, T, H, G, K), torch.randn(B, T, H, K)
    cos, sin = tables(T, K)
    compute = lambda q, k, v: attention(q, k, v, cos, sin)  # noqa: E731
    full = with_gradients(compute, leaves, grad)
    row = with_gradients(compute, [x[1:2].detach().requires_grad_() for x in leaves], grad[1:2])
    assert all(torch.equal(a[1:2], b) for a, b in zip(full, row, strict=True))
    heads = [leaves[0][:, :, 2:4], leaves[1][:, :, 1:2], leaves[2][:, :, 1:2]]
    part = with_gradients(compute, [x.detach().requires_grad_() for x in heads], grad[:, :, 2:4])
    assert torch.equal(full[1][:, :, 2:4], part[1])
    assert torch.equal(full[2][:, :, 1:2], part[2])


THREADS = """
import hashlib, json, torch
from drumline.numerics.kernels import attention
digests = {}
for threads in (1, 2, 3, 8):
    torch.set_num_threads(threads)
    for case, (B, T, H, G, K) in {"few heads": (1, 300, 2, 1, 16), "many heads": (2, 130, 8, 8, 32)}.items():
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn((B, T, n, K), generator=generator).requires_grad_() for n in (H, G, G))
        angle = torch.arange(T)[:, None] * torch.logspace(0, -3, K // 2)
        out = attention(q, k, v, angle.cos(), angle.sin())
        grads = torch.autograd.grad(out, (q, k, v), torch.randn(out.shape, generator=generator))
        digest = hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in (out, *grads))).hexdigest()
        digests.setdefault(case, []).append(digest)
print(json.dumps(digests))
"""


def test_bits_do_not_depend_on_the_number_of_threads():
    # In a process of its own: a parent that ever ran two OpenMP threads cannot fork ranks.
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120, check=True)
    for case, digests in json.loads(done.stdout).items():
        assert len(digests) == 4
        assert len(set(digests)) == 1, case


@ranks(2)
def test_the_kernel_runs_in_forked_ranks():
    q, k, v = inputs(1, 80, 2, 2, 16)
    attention(q, k, v, *tables(80, 16)).sum().backward()
    assert q.grad is not None


def test_a_nan_in_a_query_reaches_that_rows_output_only():
    q, k, v = inputs(1, 70, 1, 1, 16)
    with torch.no_grad():
        q[0, 66, 0, 3] = torch.nan
    out = attention(q, k, v, *tables(70, 16))
    assert out[0, 66].isnan().all()
    assert not out[0, :66].isnan().any()
    assert not out[0, 67:].isnan().any()


def test_the_operators_satisfy_torchs_own_checks():
    q, k, v = inputs(2, 40, 4, 2, 16)
    q, k, v = (x.detach() for x in (q, k, v))
    cos, sin = tables(40, 16)
    out, logsumexp = torch.ops.drumline.attention(q, k, v, cos, sin, None)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.drumline.attention.default, (q, k, v, cos, sin, None), test_utils=checks)
    backward = torch.ops.drumline.attention_backward.default
    torch.library.opcheck(backward, (q, q, k, v, cos, sin, None, out, logsumexp), test_utils=checks)


def test_a_compiled_caller_gets_the_same_bits():
    leaves, grad = inputs(1, 70, 2, 1, 16), torch.randn(1, 70, 2, 16)
    cos, sin = tables(70, 16)
    compute = lambda q, k, v: attention(q * 2.0, k, v, cos, sin)  # noqa: E731
    eager = with_gradients(compute, leaves, grad)
    compiled = with_gradients(torch.compile(compute, fullgraph=True, backend="aot_eager"), leaves, grad)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k[:, :5], v), "does not go with"),
        (lambda q, k, v: (q, k.bfloat16(), v), "alike in fp32 or bf16"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "alike in fp32 or bf16"),
        (lambda q, k, v: (q[..., :8], k[..., :8], v[..., :8]), "K / 2"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    q, k, v = inputs(1, 6, 2, 1, 16)
    with pytest.raises(ValueError, match=message):
        attention(*change(q, k, v), *tables(6, 16))


def no_check(library):
    pass


def test_without_a_compiler_the_reason_is_named(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(build.KernelError, match=r"no C\+\+ compiler"):
        build.load("attention", check=no_check)


def test_a_source_that_does_not_compile_gives_the_compilers_error(monkeypatch, tmp_path):
    (tmp_path / "attention.cpp").write_text("int broken( {")
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "_cache_folder", lambda: tmp_path)
    with pytest.raises(build.KernelError, match=r"could not build attention.cpp: .*error"):
        build.load("attention", check=no_check)


def test_a_build_with_wrong_results_is_refused_and_not_kept(monkeypatch, tmp_path):
    for source in build.HERE.iterdir():
        if source.suffix in (".cpp", ".h"):
            text = source.read_text()
            (tmp_path / source.name).write_text(text.replace("(load(y) - dot[n])", "(load(y) + dot[n])"))
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "_cache_folder", lambda: tmp_path)
    with pytest.raises(build.KernelError, match="dq differs from fp64"):
        build.load("attention", check=causal_attention._check)
    assert not list(tmp_path.glob("*.so"))


def test_a_build_is_checked_where_gradients_are_off_too(monkeypatch, tmp_path):
    (tmp_path / "tiny.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "_cache_folder", lambda: tmp_path)

    def check(library):
        x = torch.ones(2, requires_grad=True)
        assert torch.autograd.grad(x.sum(), x)[0].sum() == 2

    with torch.no_grad():
        assert build.load("tiny", check=check).answer() == 42


def test_ranks_that_start_together_build_once(monkeypatch, tmp_path):
    (tmp_path / "tiny.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "_cache_folder", lambda: tmp_path)
    compile_ = build._compile

    def counted(*args):
        (tmp_path / f"compiled-by-{os.getpid()}").touch()
        compile_(*args)

    monkeypatch.setattr(build, "_compile", counted)

    @ranks(3)
    def load_everywhere():
        assert build.load("tiny", check=no_check).answer() == 42

    load_everywhere()
    assert len(list(tmp_path.glob("compiled-by-*"))) == 1
