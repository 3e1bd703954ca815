"""A training step with and without a recorder, in alternating rounds on one rank with one thread.

The model is `llama3-debug` as it is: 6 million parameters, 2,048 tokens a step. Without a recorder the step is the very
same code; that no hook is left is counted, not timed.
"""

import tempfile
import time
from pathlib import Path

import torch
from harness import Bar, alternate, median_of, paired_ratio

from drumline import models
from drumline.capture import LEVELS, Recorder, tokens_of
from drumline.comm import World, read_place
from drumline.data import Loader
from drumline.data.made_up import made_up
from drumline.parallel import build_mesh, holder
from drumline.recipe import load
from drumline.train.assemble import assemble, subject_of
from drumline.train.scalars import make_reduce_scalars
from drumline.train.step import count_valid, train_step
from sections.section import Section, on_ranks

ROUNDS = {False: 9, True: 4}
MOST = {"hash": 1.10, "tensors": 2.0}
OFF = "off"


def measure(quick: bool) -> Section:
    """Measures; `quick` takes fewer rounds."""
    found = on_ranks(1, run, ROUNDS[quick])
    rounds = found["rounds"]
    bars = [
        Bar(f"speed of a step recorded as {level}, over one that is not", paired_ratio(rounds, OFF, level), 1 / most)
        for level, most in MOST.items()
    ]
    bars.append(Bar("modules without a hook, over all, where nothing is recorded", found["without_hooks"], 1.0))
    lines = ["capture: seconds a step (median) and ratio to a step that is not recorded"]
    for name in (OFF, *LEVELS):
        ratio = paired_ratio(rounds, name, OFF)
        lines.append(f"  {name:8} {median_of(rounds, name):7.3f}  {ratio:5.2f}")
    return Section(bars, {"rounds": rounds}, "\n".join(lines))


def run(num_rounds: int) -> dict[str, object]:
    """Seconds of each contestant's step, a row a round."""
    cpu = torch.device("cpu")
    recipe = load("llama3-debug", ["data.sources=made-up", "run.device=cpu"])
    world, mesh = World(read_place(), cpu), build_mesh(recipe.layout, cpu, 0)
    made = assemble(recipe, mesh, cpu)
    models.initialize(made.model, 0, holder(made.places))
    data = recipe.data
    rows = made_up(data, 0, recipe.model)
    loader = Loader(rows, global_batch=data.global_batch, micro_batch=data.micro_batch, data_rank=0, data_degree=1)
    batches = loader.batches(0)
    num_tokens, reduce_scalars = count_valid(batches, mesh), make_reduce_scalars(world, mesh)
    step = 1

    def take(recorder: Recorder | None) -> float:
        nonlocal step
        step += 1
        begin = time.perf_counter()
        if recorder is not None:
            recorder.start(step)
        train_step(
            batches,
            num_tokens,
            1e-4,
            passes=made.passes,
            gradients=made.gradients,
            optimizer=made.optimizer,
            max_grad_norm=1.0,
            reduce_scalars=reduce_scalars,
            check_finite=lambda result, _: recorder.reduced(result.loss, result.grad_norm) if recorder else None,
            watch=recorder,
        )
        if recorder is not None:
            recorder.finish()
        return time.perf_counter() - begin

    with tempfile.TemporaryDirectory(prefix="drumline-bench-") as name:
        subject, tokens, steps = subject_of(made), tokens_of(data, mesh, None), range(1, 1000)
        recorders: dict[str, Recorder | None] = {OFF: None}
        for level in LEVELS:
            recorders[level] = Recorder(subject, tokens, steps=steps, folder=Path(name, level), level=level)
        turns = {level: (lambda recorder=recorder: take(recorder)) for level, recorder in recorders.items()}
        alternate(turns, 1)  # builds kernels and states
        rounds = alternate(turns, num_rounds)
    modules = list(made.model.modules())
    bare = [m for m in modules if not m._forward_hooks and not m._forward_pre_hooks and not m._backward_hooks]
    return {"rounds": rounds, "without_hooks": len(bare) / len(modules)}
