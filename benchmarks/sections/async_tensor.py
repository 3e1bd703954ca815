"""A training step of tensor parallelism in chunks behind their transfers, beside one collective at a time.

Twice: as this machine's gloo moves tensors, which is a copy by the very cores that compute, so that hiding it gains
nothing; and over a link that is emulated: a transfer is over no earlier than a link of a given bandwidth, one transfer
at a time, would have it. Who waits for the link sleeps, as it would for a network card, while who has work computes.
The bandwidth is such that the bytes of a step take half as long as a core works in it. Of two ranks' matmuls one half
can hide a transfer; what embedding and loss move, both ways move at once; so that async hides a part only.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from harness import Bar, alternate, median_of, paired_ratio

from drumline import models
from drumline.comm import Passing
from drumline.parallel import build_mesh, holder
from drumline.parallel.tensor import chunks, collectives, tokens
from drumline.recipe import load
from drumline.train.assemble import assemble
from sections.section import Section, on_ranks, timed_together
from sections.steps import one_sequence, step

RANKS, LINK_SHARE = 2, 0.5
TOKENS = {False: 1024, True: 512}
ROUNDS = {False: 31, True: 11}
CONTESTANTS = {"plain": "false", "async": "true"}
BARS = {"gloo": 0.97, "emulated link": 1.0}  # not slower but for noise; faster
MODEL = [
    "model.dim=512",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.hidden_dim=1408",
    "model.num_layers=2",
    "model.vocab_size=2048",
    f"layout.tp={RANKS}",
]


def measure(quick: bool) -> Section:
    """Measures; `quick` takes a shorter sequence and fewer rounds."""
    found = on_ranks(RANKS, run, TOKENS[quick], ROUNDS[quick])
    bars, lines = [], [f"(d) a step with {RANKS} tensor-parallel ranks, {TOKENS[quick]:,} tokens"]
    for kind, bar in BARS.items():
        rounds = found["rounds"][kind]
        each = sorted(row["plain"] / row["async"] for row in rounds)
        quarter = len(each) // 4
        spread = f"middle half of rounds {each[quarter]:.2f} to {each[-1 - quarter]:.2f}"
        ratio = paired_ratio(rounds, "plain", "async")
        bars.append(Bar(f"{kind}: speed of async over plain tensor parallelism", ratio, bar, spread))
        times = "   ".join(f"{name} {1e3 * median_of(rounds, name):6.1f} ms" for name in CONTESTANTS)
        lines.append(f"  {kind:14} {times}   ratio {ratio:4.2f}, {spread}")
    lines.append(f"  the emulated link has {found['bytes_per_s'] / 1e9:.2f} GB/s")
    return Section(bars, found, "\n".join(lines))


def run(num_tokens: int, num_rounds: int) -> dict[str, object]:
    """All rounds over gloo and over the emulated link, on each rank."""
    bodies = {}
    for name, value in CONTESTANTS.items():
        recipe, cpu = load("llama3-debug", [*MODEL, f"layout.tp_async={value}"]), torch.device("cpu")
        made = assemble(recipe, build_mesh(recipe.layout, cpu, dist.get_rank()), cpu)
        models.initialize(made.model, 0, holder(made.places))
        bodies[name] = partial(step, made, one_sequence(num_tokens, recipe.model.vocab_size))
    first = {name: body() for name, body in bodies.items()}
    if abs(first["plain"] - first["async"]) > 1e-3 * abs(first["plain"]):
        raise SystemExit(f"losses differ, {first}: not the same step")
    contestants = {name: partial(timed_together, body) for name, body in bodies.items()}
    rounds = {"gloo": alternate(contestants, num_rounds)}
    link = _Link(float("inf"))
    busy = time.process_time()
    with link.in_place():
        bodies["plain"]()
    busy = time.process_time() - busy
    rate = torch.tensor(link.num_bytes / (LINK_SHARE * busy), dtype=torch.float64)
    dist.all_reduce(rate, dist.ReduceOp.MAX)  # one link, whatever a rank's clock says
    with _Link(float(rate)).in_place():
        rounds["emulated link"] = alternate(contestants, num_rounds)
    return {"rounds": rounds, "bytes_per_s": float(rate)}


class _Link:
    """The way out of a rank, which carries one tensor at a time."""

    def __init__(self, bytes_per_s: float):
        self.num_bytes = 0
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets everything that tensor parallelism moves go over this link."""
        gather, scatter = collectives.start_gather, collectives.start_scatter
        link = self

        def start_gather(x, ranks):
            return link.carry(gather(x, ranks), x.nbytes * (ranks.degree - 1))

        def start_scatter(parts, ranks):
            return link.carry(scatter(parts, ranks), parts.nbytes * (ranks.degree - 1) // ranks.degree)

        class Slow(Passing):
            def __init__(self, sent, *arguments, **options):
                super().__init__(sent, *arguments, **options)
                self._come = link.carry(super().wait, sent.nbytes)

            def wait(self):
                return self._come()

        with mock.patch.object(chunks, "Passing", Slow):
            for module in (collectives, tokens):
                module.start_gather, module.start_scatter = start_gather, start_scatter
            try:
                yield
            finally:
                for module in (collectives, tokens):
                    module.start_gather, module.start_scatter = gather, scatter

    def carry(self, wait: Callable[[], torch.Tensor], num_bytes: int) -> Callable[[], torch.Tensor]:
        """What waits for a transfer that starts now, no shorter than the link takes."""
        self.num_bytes += num_bytes
        self._free_at = end = max(time.perf_counter(), self._free_at) + num_bytes / self._bytes_per_s

        def come() -> torch.Tensor:
            found = wait()
            time.sleep(max(0.0, end - time.perf_counter()))
            return found

        return come
