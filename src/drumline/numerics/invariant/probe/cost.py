"""What an invariant operator costs beside torch's: forward and backward, in alternating rounds on the same inputs."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drumline.numerics import invariant
from drumline.numerics.invariant.probe.contrast import Torch
from drumline.numerics.invariant.probe.operators import normal

_BATCH, _DIM, _HIDDEN, _VOCABULARY = 512, 768, 2048, 4096


@dataclass(frozen=True)
class Cost:
    """The price of one operator.

    Attributes:
        ratio: drumline's time over torch's, the median over rounds of the ratio within a round; below 1 is faster.
        own_s: median seconds of drumline's, forward and backward.
        torch_s: of torch's.
        shape: what was computed.
    """

    ratio: float
    own_s: float
    torch_s: float
    shape: str


def cost(name: str, dtype: torch.dtype, rounds: int = 7, rows: int = _BATCH) -> Cost | None:
    """Times an operator's forward and backward, drumline's and torch's in turn.

    Args:
        name: one of `NAMES`.
        dtype: of the inputs.
        rounds: pairs of measurements.
        rows: of the batch (tokens).

    Returns:
        The cost; None for operators that are torch's own.
    """
    if name == "elementwise":
        return None
    run, shape = _work(name, dtype, rows)
    taken: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        order = (invariant, Torch) if number % 2 else (Torch, invariant)
        seconds = {operators: _timed(run, operators) for operators in order}
        taken.append((seconds[invariant], seconds[Torch]))
    taken = taken[1:]  # the first pays for pages and caches
    ratio = statistics.median(own / other for own, other in taken)
    own_s, torch_s = (statistics.median(column) for column in zip(*taken, strict=True))
    return Cost(ratio, own_s, torch_s, shape)


def _timed(run: Callable[[Any], object], operators: Any) -> float:
    # One thread's own time leaves out what other processes of a busy machine take.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run(operators)
    return clock() - start


def _work(name: str, dtype: torch.dtype, rows: int) -> tuple[Callable[[Any], object], str]:
    """What is timed, and its shape in words."""

    def passes(call: Callable[[Any], Tensor], leaves: list[Tensor], grad: Tensor) -> Callable[[Any], object]:
        for leaf in leaves:
            leaf.requires_grad_()
        return lambda operators: torch.autograd.grad(call(operators), leaves, grad)

    x, wide = normal(rows, _DIM, dtype=dtype), normal(rows, _HIDDEN, dtype=dtype)
    if name in ("linear", "matmul"):
        weight = normal(_HIDDEN, _DIM, dtype=dtype)
        if name == "linear":
            return passes(lambda o: o.linear(x, weight), [x, weight], wide), f"{rows} x {_DIM} -> {_HIDDEN}"
        turned = weight.t().contiguous()
        return passes(lambda o: o.matmul(x, turned), [x, turned], wide), f"{rows} x {_DIM} -> {_HIDDEN}"
    if name == "attention":
        q, k, v, grad = (normal(1, rows, 8, 64, dtype=dtype).add_(n) for n in range(4))
        angle = torch.outer(torch.arange(rows).float(), 1e4 ** -torch.arange(0, 1, 2 / 64))
        cos, sin = angle.cos(), angle.sin()
        return passes(lambda o: o.attention(q, k, v, cos, sin), [q, k, v], grad), f"{rows} tokens, 8 heads of 64"
    if name == "embedding":
        tokens = torch.randint(0, _VOCABULARY, (rows,), generator=torch.Generator().manual_seed(0))
        table = normal(_VOCABULARY, _DIM, dtype=dtype)
        return passes(lambda o: o.embedding(tokens, table), [table], x), f"{rows} tokens of {_VOCABULARY} x {_DIM}"
    if name == "cross_entropy":
        logits, labels = normal(rows, _VOCABULARY, dtype=dtype), torch.arange(rows) % _VOCABULARY
        return passes(lambda o: o.cross_entropy(logits, labels), [logits], torch.ones(rows)), f"{rows} x {_VOCABULARY}"
    if name == "rms_norm":
        scale = normal(_DIM, dtype=dtype)
        return passes(lambda o: o.rms_norm(x, scale, 1e-5), [x, scale], x.detach().clone()), f"{rows} x {_DIM}"
    if name == "swiglu":
        up = wide.clone()
        return passes(lambda o: o.swiglu(wide, up), [wide, up], wide.detach().clone()), f"{rows} x {_HIDDEN}"
    seed = wide.detach().clone() if "softmax" in name else torch.ones(rows, dtype=dtype)
    return passes(lambda o: getattr(o, name)(wide, -1), [wide], seed), f"{rows} x {_HIDDEN}"
