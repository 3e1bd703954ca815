"""Ring attention on two ranks of one thread beside full attention on one rank of two threads, and torch's own ring.

The same causal sequence, forward and backward with rotation, so that everybody does the same work on the same two
cores. Full attention is torch's SDPA, whose CPU kernel all three call.
"""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Bar, alternate, median_of, paired_ratio
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from drumline.models.attention import SdpaAttend
from drumline.models.rope import Rope, rotate
from drumline.parallel.context import ContextSplit, context_attend, context_groups
from drumline.parallel.mesh import Mesh
from drumline.recipe.layout import Layout
from sections.section import Section, on_ranks

RANKS, HEADS, KV_HEADS, WIDTH = 2, 8, 4, 64
TOKENS = {False: 8192, True: 4096}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
METHODS = ("ring", "gather", "ulysses")
BARS = {"one rank": 0.85, "torch's ring": 1.0}
_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def measure(quick: bool) -> Section:
    """Measures; `quick` takes a shorter sequence and fewer rounds."""
    bars, figures, lines = [], {}, []
    for name in DTYPES:
        both = on_ranks(RANKS, run, name, TOKENS[quick], 3 if quick else 5)
        rounds = [{name: seconds for name, (seconds, _) in row.items()} for row in both]
        work = [{name: core_seconds for name, (_, core_seconds) in row.items()} for row in both]
        for peer, bar in BARS.items():
            bars.append(Bar(f"{name} ring attention's speed over {peer}", paired_ratio(rounds, peer, "ring"), bar))
        figures[name] = {
            "seconds": {c: median_of(rounds, c) for c in rounds[0]},
            "core_seconds": {c: median_of(work, c) for c in rounds[0]},
            "rounds": both,
        }
        lines.append(f"  {name}, {TOKENS[quick]:,} tokens, forward and backward")
        for c in rounds[0]:
            wall, cores = 1e3 * median_of(rounds, c), 1e3 * median_of(work, c)
            lines.append(f"    {c:13} {wall:6.0f} ms   {cores:6.0f} ms of cores")
    return Section(bars, figures, "\n".join(["(a) attention over a spread sequence, two cores", *lines]))


def run(dtype: str, num_tokens: int, num_rounds: int) -> list[dict[str, tuple[float, float]]]:
    """All rounds, on each rank: seconds and core seconds of every contestant."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    whole = [torch.randn(1, num_tokens, n, WIDTH, generator=generator).to(DTYPES[dtype]) for n in heads]
    angle = torch.outer(torch.arange(num_tokens).float(), 1e4 ** -torch.arange(0, 1, 2 / WIDTH))
    rope = Rope(angle.cos(), angle.sin())
    split = ContextSplit(RANKS, dist.get_rank())
    mine = [split.shard(x) for x in whole]
    mesh = Mesh(Layout(cp=RANKS), None, dist.get_rank())
    attends = {
        method: context_attend(method, context_groups(mesh, RANKS if method == "ulysses" else 1), SdpaAttend())
        for method in METHODS
    }
    positions = split.positions(num_tokens)
    local = Rope(rope.cos_TK2[positions], rope.sin_TK2[positions])

    def of_torch(q, k, v):
        return TorchRing.apply(rotate(q, local), rotate(k, local), v)

    def alone():
        if split.rank == 0:
            torch.set_num_threads(RANKS)
            once(lambda *x: SdpaAttend()(*x, rope, None), whole)
            torch.set_num_threads(1)

    def across(attend):
        return lambda: once(lambda *x: attend(*x, rope, None), mine)

    contestants = {method: across(attend) for method, attend in attends.items()}
    contestants |= {"torch's ring": lambda: once(of_torch, mine), "one rank": alone}
    check(once(lambda *x: SdpaAttend()(*x, rope, None), whole), once(of_torch, mine), split, dtype)
    check(once(lambda *x: SdpaAttend()(*x, rope, None), whole), contestants["ring"](), split, dtype)
    return alternate({name: (lambda b=body: timed(b)) for name, body in contestants.items()}, num_rounds)


def once(attend, inputs):
    """One forward and backward; the result and the gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attend(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, inputs[3])


def timed(body) -> tuple[float, float]:
    """Seconds between two barriers, and those that all ranks' cores worked in them."""
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    body()
    total = torch.tensor(time.process_time() - busy)
    dist.all_reduce(total)
    return time.perf_counter() - start, total.item()


def check(whole, mine, split: ContextSplit, dtype: str) -> None:
    """A contestant that computes something else is no contestant."""
    for a, b in zip(whole, mine, strict=True):
        error = F.mse_loss(split.shard(a).float(), b.float()).sqrt() / a.float().norm() * a.numel() ** 0.5
        if error > {"fp32": 1e-5, "bf16": 2e-2}[dtype]:
            raise SystemExit(f"results differ by {error:.1e}: not the same attention")


class TorchRing(torch.autograd.Function):
    """torch's ring, around the same CPU kernel."""

    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = torch_ring._templated_ring_attention(dist.group.WORLD, 2, _cpu, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx, *grad_outputs):
        q, k, v, out, lse = ctx.saved_tensors
        grads = torch_ring._templated_ring_attention_backward(
            *(dist.group.WORLD, 2, _cpu_backward, grad_outputs[0].transpose(1, 2), "grad_out"),
            *(q, k, v, out, lse, True),
            dropout_p=0.0,
        )
        return tuple(grad.transpose(1, 2) for grad in grads)
