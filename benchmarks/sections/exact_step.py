"""A training step in exact mode beside the default step, dp and fsdp, on two ranks with one thread each.

Both train the same model on the same tokens from the same weights, two micro-batches a rank, each a lane in exact mode.
The default step overlaps its reduction with the backward and takes torch's fused AdamW; the exact one does neither.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from harness import Bar, alternate, median_of, paired_ratio

from drumline import models
from drumline.comm import World, read_place
from drumline.data import Batch
from drumline.parallel import build_mesh, holder
from drumline.recipe import load
from drumline.recipe.sections import Recipe
from drumline.train.assemble import Assembled, assemble
from drumline.train.scalars import make_reduce_scalars
from drumline.train.step import train_step
from sections.section import Section, on_ranks, timed_together

RANKS, MICROBATCHES = 2, 2
BAR = 1 / 1.15
SHAPE = {False: (12, 512, 51200, 7), True: (1, 512, 4096, 3)}  # layers, tokens of a micro-batch, vocabulary, rounds
LAYOUTS = ("dp2", "fsdp2")
PRECISION = "fp32"


def measure(quick: bool) -> Section:
    """Measures; `quick` takes a layer, fewer tokens and rows of the vocabulary, and fewer rounds."""
    layers, tokens, vocabulary, rounds = SHAPE[quick]
    found = {layout: on_ranks(RANKS, run, layout, layers, tokens, vocabulary, rounds) for layout in LAYOUTS}
    bars, lines = [], [f"exact_step: {layers} layers of llama3-125m, {RANKS} ranks, {tokens} tokens a micro-batch"]
    for layout, rows in found.items():
        ratio = paired_ratio(rows, "default", "exact")
        bars.append(Bar(f"{layout}: speed of the exact step over the default step", ratio, BAR))
        times = "   ".join(f"{name} {median_of(rows, name):6.2f} s" for name in ("default", "exact"))
        lines.append(f"  {layout:6} {times}   ratio {ratio:4.2f}")
    return Section(bars, {"rounds": found, "precision": PRECISION}, "\n".join(lines))


def run(layout: str, num_layers: int, num_tokens: int, vocab_size: int, num_rounds: int) -> list[dict[str, float]]:
    """All rounds of a layout, on each rank; seconds of a step."""
    bodies = {mode: _stepper(layout, mode, num_layers, num_tokens, vocab_size) for mode in ("default", "exact")}
    losses = {mode: [body(), body()] for mode, body in bodies.items()}  # also brings optimizer states into being
    if abs(losses["default"][1] - losses["exact"][1]) > 1e-3 * abs(losses["exact"][1]):
        raise SystemExit(f"losses differ, {losses}: not the same step")
    return alternate({mode: partial(timed_together, body) for mode, body in bodies.items()}, num_rounds)


def _stepper(layout: str, mode: str, num_layers: int, num_tokens: int, vocab_size: int) -> Callable[[], float]:
    recipe = load(
        "llama3-125m",
        [
            f"layout={layout}",
            f"numerics.mode={mode}",
            f"model.num_layers={num_layers}",
            f"model.vocab_size={vocab_size}",
            "data.tokenizer=bytes",
            f"data.seq_len={num_tokens}",
            "data.micro_batch=1",
            f"data.global_batch={RANKS * MICROBATCHES}",
            f"precision.compute={PRECISION}",
        ],
    )
    cpu = torch.device("cpu")
    world = World(read_place({"RANK": str(dist.get_rank()), "WORLD_SIZE": str(RANKS), **_HERE}), cpu)
    made = assemble(recipe, build_mesh(recipe.layout, cpu, world.rank), cpu)
    models.initialize(made.model, 0, holder(made.places))
    return partial(_step, made, recipe, world)


_HERE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def _step(made: Assembled, recipe: Recipe, world: World) -> float:
    batches = [_batch(recipe, made.mesh.data_rank * MICROBATCHES + index) for index in range(MICROBATCHES)]
    reduce_scalars = make_reduce_scalars(world, made.mesh, exact=recipe.numerics.mode == "exact")
    return train_step(
        batches,
        RANKS * MICROBATCHES * recipe.data.seq_len,
        1e-4,
        passes=made.passes,
        gradients=made.gradients,
        optimizer=made.optimizer,
        max_grad_norm=1.0,
        reduce_scalars=reduce_scalars,
        check_finite=lambda result, batches: None,
    ).loss


def _batch(recipe: Recipe, number: int) -> Batch:
    draw, size = torch.Generator().manual_seed(number), recipe.data.seq_len
    tokens = torch.randint(recipe.model.vocab_size, (1, size + 1), generator=draw)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.zeros(1, size, dtype=torch.int32))
