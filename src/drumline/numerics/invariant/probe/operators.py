"""What is probed: for each operator the shapes, the call and the comparisons that fit it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from drumline.numerics.invariant.probe.compare import THREADS, Trial, of_rows, threads, trial
from drumline.numerics.invariant.registry import PROBED

Probe = Callable[[Any, torch.dtype, bool], Iterator[Trial]]
"""(operators: drumline's or torch's, dtype, quick) -> trials."""

_WIDTHS = ((200, 1), (200, 31), (200, 77), (200, 768), (130, 1000), (110, 4097))
_PRODUCTS = ((130, 37, 70), (110, 768, 768), (110, 256, 1000), (110, 512, 2048), (70, 2048, 688))
_QUICK = 3  # of the shapes


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    """A reproducible normal tensor of some shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _over_widths(make: Callable[[Any, int, int, torch.dtype], tuple[Callable, list[Tensor], list[Tensor]]]) -> Probe:
    def probe(operators: Any, dtype: torch.dtype, quick: bool) -> Iterator[Trial]:
        for rows, width in _WIDTHS[-_QUICK:] if quick else _WIDTHS:
            yield from of_rows(*make(operators, rows, width, dtype))

    return probe


def _softmax(o: Any, rows: int, width: int, dtype: torch.dtype):
    return lambda x: o.softmax(x, -1), [normal(rows, width, dtype=dtype)], []


def _log_softmax(o: Any, rows: int, width: int, dtype: torch.dtype):
    return lambda x: o.log_softmax(x, -1), [normal(rows, width, dtype=dtype)], []


def _rms_norm(o: Any, rows: int, width: int, dtype: torch.dtype):
    return lambda x, w: o.rms_norm(x, w, 1e-5), [normal(rows, width, dtype=dtype)], [normal(width, dtype=dtype)]


def _swiglu(o: Any, rows: int, width: int, dtype: torch.dtype):
    both = normal(2 * rows, width, dtype=dtype)
    return o.swiglu, [both[:rows], both[rows:]], []


def _cross_entropy(o: Any, rows: int, width: int, dtype: torch.dtype):
    return o.cross_entropy, [normal(rows, width, dtype=dtype), torch.arange(rows) % width], []


def _of_sums(name: str) -> Probe:
    def of_last_dim(o: Any, rows: int, width: int, dtype: torch.dtype):
        return lambda x: getattr(o, name)(x, -1), [normal(rows, width, dtype=dtype)], []

    by_rows = _over_widths(of_last_dim)

    def probe(operators: Any, dtype: torch.dtype, quick: bool) -> Iterator[Trial]:
        """Sums over the last dim by rows; sums over dim 0 and over all by threads and by split columns."""
        call = getattr(operators, name)
        yield from by_rows(operators, dtype, quick)
        for shape in ((1000, 700), (3000, 97))[: 1 if quick else 2]:
            x = normal(*shape, dtype=dtype)
            with threads(1):
                whole = [call(x, 0), call(x)]
                for first, last in ((0, 1), (3, 36), (17, 97)):
                    yield trial("batch", [call(x[:, first:last], 0)], [whole[0][first:last]])
            for number in THREADS:
                with threads(number):
                    yield trial("threads", [call(x, 0), call(x)], whole)

    return probe


def _linear(operators: Any, dtype: torch.dtype, quick: bool) -> Iterator[Trial]:
    """By rows; the weight's gradient also by chunks of 32 and 64 rows."""
    for m, n, k in _PRODUCTS[:_QUICK] if quick else _PRODUCTS:
        x, weight, grad = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype), normal(m, n, dtype=dtype)
        yield from of_rows(operators.linear, [x], [weight])
        with threads(1):
            whole = operators.weight_gradient(grad, x)
            for size in (32, 64):
                total = None
                for first in range(0, m, size):
                    total = operators.weight_gradient(grad[first : first + size], x[first : first + size], total)
                assert total is not None
                yield trial("chunk", [total], [whole])


def _matmul(operators: Any, dtype: torch.dtype, quick: bool) -> Iterator[Trial]:
    """By rows, and by columns of the second factor."""
    for m, n, k in _PRODUCTS[:_QUICK] if quick else _PRODUCTS:
        a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype)
        yield from of_rows(operators.matmul, [a], [b])
        with threads(1):
            whole = operators.matmul(a, b)
            for first, last in ((0, 1), (3, 20), (16, n // 2), (n // 3, n)):
                yield trial("chunk", [operators.matmul(a, b[:, first:last])], [whole[:, first:last]])


def _embedding(operators: Any, dtype: torch.dtype, quick: bool) -> Iterator[Trial]:
    """A row's gradient with the other rows' tokens there or not, and by threads."""

    def run(tokens: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
        leaf = weight.clone().requires_grad_()
        return torch.autograd.grad(operators.embedding(tokens, leaf), leaf, grad)[0]

    for num_tokens, vocabulary, width in ((600, 50, 77), (3000, 500, 768), (5000, 900, 512))[: 2 if quick else 3]:
        tokens = torch.randint(0, vocabulary, (num_tokens,), generator=torch.Generator().manual_seed(0))
        grad, weight = normal(num_tokens, width, dtype=dtype), normal(vocabulary, width, dtype=dtype)
        with threads(1):
            whole = run(tokens, grad, weight)
            for share in (2, 3, 7):
                kept = tokens % share == 0
                part = run(tokens[kept], grad[kept], weight)
                yield trial("batch", [part[::share]], [whole[::share]])
            moved = torch.cat((tokens[:1].expand(37) * 0 + vocabulary, tokens))
            longer = torch.cat((weight, weight[:1]))
            shifted = run(moved, torch.cat((grad[:37], grad)), longer)
            yield trial("position", [shifted[:vocabulary]], [whole])
        for number in THREADS:
            with threads(number):
                yield trial("threads", [run(tokens, grad, weight)], [whole])


def _attention(operators: Any, dtype: torch.dtype, quick: bool) -> Iterator[Trial]:
    """By sequences, forward and backward; a prefix, chunks against a cache and single tokens against the full pass."""
    for B, S, H, G, K in ((3, 130, 4, 2, 16), (3, 200, 4, 4, 64), (3, 333, 8, 2, 64))[: 2 if quick else 3]:
        q, k, v = (normal(B, S, n, K, dtype=dtype) for n in (H, G, G))
        angle = torch.outer(torch.arange(S).double(), 1e4 ** -torch.arange(0, 1, 2 / K, dtype=torch.float64))
        cos, sin = angle.cos().float(), angle.sin().float()
        call = operators.attention
        yield from of_rows(lambda q, k, v: call(q, k, v, cos, sin), [q, k, v], [])  # noqa: B023
        with threads(1):
            whole = call(q, k, v, cos, sin)
            pieces = {"position": ((0, 65), (0, S - 1)), "chunk": ((0, 64), (64, S), (17, 100), (90, S))}
            pieces["chunk"] += tuple((i, i + 1) for i in range(0, S, 29))
            for axis, spans in pieces.items():
                for first, last in spans:
                    part = call(q[:, first:last], k[:, :last], v[:, :last], cos[:last], sin[:last])
                    yield trial(axis, [part], [whole[:, first:last]])


def _elementwise(functions: Sequence[str]) -> Probe:
    def probe(operators: Any, dtype: torch.dtype, quick: bool) -> Iterator[Trial]:
        """A function of each element, at other places of other tensors."""
        x = normal(40_000 if quick else 100_000, dtype=dtype).abs() + 0.01
        for name in functions:
            function = getattr(torch, name)
            with threads(1):
                whole = function(x)
                for size in (1, 2, 3, 5, 7, 9, 15, 17, 31, 33, 47, 63, 65, 100, 1001, len(x) - 3):
                    first = (31 * size) % (len(x) - size)
                    yield trial("position", [function(x[first : first + size].clone())], [whole[first : first + size]])
                pairs = x[: len(x) // 7 * 7].view(-1, 7)
                yield trial("position", [torch.cat([function(row.clone()) for row in pairs[:300]])], [whole[:2100]])
                yield trial("chunk", [function(x[::2])], [whole[::2]])
            for number in THREADS:
                with threads(number):
                    yield trial("threads", [function(x)], [whole])

    return probe


OPERATORS: dict[str, Probe] = {
    "matmul": _matmul,
    "linear": _linear,
    "attention": _attention,
    "rms_norm": _over_widths(_rms_norm),
    "softmax": _over_widths(_softmax),
    "log_softmax": _over_widths(_log_softmax),
    "cross_entropy": _over_widths(_cross_entropy),
    "swiglu": _over_widths(_swiglu),
    "embedding": _embedding,
    "sum": _of_sums("sum"),
    "mean": _of_sums("mean"),
    "elementwise": _elementwise(PROBED),
}

ELEMENTWISE_CONTRAST: Probe = _elementwise(("sigmoid", "rsqrt", "exp2"))

NAMES = tuple(OPERATORS)
