"""A training step of exact mode in fixed pieces beside the default's, with two tensor-parallel ranks.

Two layers of the shapes of a model of 125 million parameters: where the step is a whole one, the norm and AdamW of all
parameters are in it. More blocks than ranks cost more calls of smaller products and buy layouts of more ranks.
"""

from functools import partial

import torch
import torch.distributed as dist
from harness import Bar, alternate, median_of, paired_ratio

from drumline import models
from drumline.parallel import build_mesh, holder
from drumline.recipe import load
from drumline.train.assemble import assemble
from sections.section import Section, on_ranks, timed_together
from sections.steps import one_sequence, step

RANKS = 2
TOKENS = {False: 2048, True: 512}
ROUNDS = {False: 15, True: 5}
EXACT = "numerics.mode=exact"
CONTESTANTS = {
    "default": (),
    "2 blocks": (EXACT, "numerics.blocks=2"),
    "4 blocks": (EXACT, "numerics.blocks=4"),
}
BARS = {"2 blocks": 1 / 1.3, "4 blocks": 1 / 1.3}
DTYPES = ("fp32", "bf16")
MODEL = (
    "model.dim=768",
    "model.num_heads=12",
    "model.num_kv_heads=12",
    "model.head_dim=64",
    "model.hidden_dim=2048",
    "model.num_layers=2",
    "model.vocab_size=4096",
    "data.global_batch=1",
    "data.micro_batch=1",
    f"layout.tp={RANKS}",
)


def measure(quick: bool) -> Section:
    """Measures; `quick` takes a shorter sequence and fewer rounds."""
    rounds = on_ranks(RANKS, run, TOKENS[quick], ROUNDS[quick])
    bars, lines = [], [f"exact_tp: a step with {RANKS} tensor-parallel ranks, {TOKENS[quick]:,} tokens"]
    for dtype in DTYPES:
        times = "   ".join(f"{name} {1e3 * median_of(rounds[dtype], name):7.1f} ms" for name in CONTESTANTS)
        ratios = {name: paired_ratio(rounds[dtype], "default", name) for name in BARS}
        lines.append(f"  {dtype}  {times}   " + ", ".join(f"{name}: {ratio:4.2f}" for name, ratio in ratios.items()))
        bars += [
            Bar(f"{dtype}: speed of exact mode with {name} over default", ratios[name], BARS[name]) for name in BARS
        ]
    return Section(bars, {"rounds": rounds}, "\n".join(lines))


def run(num_tokens: int, num_rounds: int) -> dict[str, object]:
    """All rounds, on each rank."""
    found = {}
    for dtype in DTYPES:
        contestants = {}
        for name, overrides in CONTESTANTS.items():
            keys = [*MODEL, f"data.seq_len={num_tokens}", f"precision.compute={dtype}", *overrides]
            recipe, cpu = load("llama3-debug", keys), torch.device("cpu")
            made = assemble(recipe, build_mesh(recipe.layout, cpu, dist.get_rank()), cpu)
            models.initialize(made.model, 0, holder(made.places))
            contestants[name] = partial(step, made, one_sequence(num_tokens, recipe.model.vocab_size))
        losses = {name: body() for name, body in contestants.items()}
        if max(losses.values()) - min(losses.values()) > 1e-2 * abs(losses["default"]):
            raise SystemExit(f"losses differ, {losses}: not the same step")
        found[dtype] = alternate(
            {name: partial(timed_together, body) for name, body in contestants.items()}, num_rounds
        )
    return found
