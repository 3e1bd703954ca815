"""Every kernel compiles for an NVIDIA GPU, also where there is none: to PTX, and by ptxas to machine code.

The operators are called with CPU tensors; in the place where a kernel would be run it is compiled, for the types and
constants with which it was called.
"""

import importlib.util
import re

import pytest
import torch
from tests.numerics.invariant.triton.here import IS_INTERPRETED

from drumline.numerics import invariant
from drumline.numerics.invariant import native

pytestmark = pytest.mark.timeout(1200)  # the compiler takes a minute of a free processor
SHARED_BYTES = 227 * 1024  # what a block may have on an H100
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}
PRODUCTS = {"_matmul", "_attend", "_queries_backward", "_keys_backward"}
KERNELS = PRODUCTS | {
    "_cross_entropy", "_embedding_backward", "_norm", "_norm_backward", "_rotate", "_shift", "_softmax",
    "_softmax_backward", "_sum_columns", "_sum_rows", "_swiglu", "_swiglu_backward", "_weight_backward",
}  # fmt: skip


def compile_for_hopper(kernel, arguments, settings):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    bound = dict(zip(names, arguments, strict=False)) | {k: v for k, v in settings.items() if k in names}
    options = {k: v for k, v in settings.items() if k not in names}
    signature, constants, attributes = {}, {}, {}
    for index, (name, parameter) in enumerate(zip(names, kernel.params, strict=True)):
        value = bound[name]
        if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if type(value) is int and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What every operator's forward and backward would run, compiled: pairs of the kernel's name and its result."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    if IS_INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    from triton.runtime.jit import JITFunction

    found = []

    def run(self, *arguments, grid, warmup, **settings):
        found.append((self.fn.__name__, compile_for_hopper(self, arguments, settings)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setattr(native, "_OF_TRITON", "cpu")
        patch.setattr(JITFunction, "run", run)
        for dtype, has_documents in ((torch.float32, True), (torch.bfloat16, False)):
            call_all(dtype, has_documents)
    return found


def call_all(dtype, has_documents):
    def backward(y):
        y.backward(torch.ones_like(y))

    x, weight = torch.ones(70, 256, dtype=dtype).requires_grad_(), torch.ones(48, 256, dtype=dtype).requires_grad_()
    tokens, scale = torch.arange(70) % 48, torch.ones(256).requires_grad_()
    backward(invariant.linear(x, weight))
    invariant.weight_gradient(x.detach(), x.detach(), torch.zeros(256, 256))
    backward(invariant.rms_norm(x, scale, 1e-5))
    backward(invariant.softmax(x))
    backward(invariant.log_softmax(x))
    backward(invariant.swiglu(x, x))
    backward(invariant.sum(x, -1) + invariant.mean(x))
    invariant.sum(x, 0)
    backward(invariant.embedding(tokens, weight))
    native.gpu("loss", x).cross_entropy(x.detach(), tokens, -100)
    q, k, v = (torch.ones(1, 130, h, 128, dtype=dtype).requires_grad_() for h in (4, 2, 2))
    starts = torch.zeros(1, 130, dtype=torch.int32) if has_documents else None
    backward(invariant.attention(q, k, v, torch.ones(130, 64), torch.ones(130, 64), starts))


def test_every_kernel_is_compiled_by_ptxas_in_both_dtypes(compiled):
    assert {name for name, _ in compiled} == KERNELS
    for name, kernel in compiled:
        assert kernel.asm["ptx"].count(".entry") == 1, name
        assert kernel.asm["cubin"].startswith(b"\x7fELF"), name


def test_no_kernel_adds_by_atomics(compiled):
    for name, kernel in compiled:
        assert not re.search(r"\b(atom|red)\.", kernel.asm["ptx"]), name


def test_a_sum_is_not_fused_with_a_product_by_the_compilers_choice(compiled):
    has_own = PRODUCTS | {"_softmax", "_cross_entropy"}  # a chain of fused additions; the polynomial of a logarithm
    for name, kernel in compiled:
        assert name in has_own or not re.search(r"\bfma\.", kernel.asm["ptx"]), name


def test_fp32_is_never_rounded_to_tf32(compiled):
    assert not [name for name, kernel in compiled if "tf32" in kernel.asm["ptx"]]


def test_bf16_products_run_on_matrix_units(compiled):
    units = [name for name, kernel in compiled if re.search(r"\b(wgmma\.mma_async|mma\.)", kernel.asm["ptx"])]
    assert set(units) == PRODUCTS


def test_tiles_fit_into_shared_memory(compiled):
    most = max((kernel.metadata.shared, name) for name, kernel in compiled)
    assert most[0] <= SHARED_BYTES, most
