"""The bubble of the real executor beside the simulated one, for every schedule, where each action takes a fixed time.

Each rank computes its real stages and then sleeps until the action's time is over. Four ranks that sleep need no more
than two cores, so that what is measured is the executor's order, its transfers and its waits, and not who gets a core.
A whole stage's forward, input gradient and weight gradient take the same time; with v stages a rank each takes 1/v.
The simulation is given those times and nothing that was measured: its transfers take no time.
Since the ranks need a core for moments only, they ask for it before other programs, where the system lets them.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from harness import Bar, alternate

from drumline import models, precision
from drumline.data import Batch
from drumline.parallel import build_mesh, holder
from drumline.parallel.pipeline import Measure, Pipeline, join
from drumline.parallel.pipeline.stage import Stage
from drumline.recipe import load
from drumline.schedules import SCHEDULES, Action, Durations, Kind, Schedule, Span, Timeline, generate, simulate, uniform
from drumline.train.spread import spread
from sections.section import Section, on_ranks

RANKS = 4
MICROBATCHES = {False: (8, 16), True: (8,)}
# Of one kind of action. What an action costs beside that, mostly gloo's 0.1 ms to start a send, must be small in it.
EACH_S = {False: 0.24, True: 0.09}
ROUNDS = {False: 3, True: 1}
BAR = 0.9
FIRST, SECOND = 2, 1  # real-time priorities
WAKING_S = 1e-3  # sleeps are up to 0.2 ms too long, so that the last of an action is spent awake
SMALL = [
    "model.num_layers=8",
    "model.dim=32",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.hidden_dim=48",
    "model.vocab_size=64",
    "data.seq_len=16",
    "data.micro_batch=1",
]


def measure(quick: bool) -> Section:
    """Measures; `quick` takes shorter actions and one round."""
    each_s = EACH_S[quick]
    rounds = on_ranks(RANKS, run, each_s, MICROBATCHES[quick], ROUNDS[quick])
    bars, figures, lines = [], {}, []
    for name in SCHEDULES:
        for number in MICROBATCHES[quick]:
            key = f"{name}, {number} micro-batches"
            expected = simulate(*_request(name, number, each_s))
            bubble = median(row[key]["bubble"] for row in rounds)
            step_s = median(row[key]["step_s"] for row in rounds)
            ratio = bubble / expected.bubble_fraction
            bars.append(Bar(f"{key}: 1 - relative error of the bubble", 1 - abs(ratio - 1), BAR))
            figures[key] = {
                "simulated": {"bubble": expected.bubble_fraction, "step_s": expected.makespan},
                "measured": {"bubble": bubble, "step_s": step_s},
                "bubble_ratio": ratio,
                "step_ratio": step_s / expected.makespan,
                "longest_action": max(row[key]["longest_action"] for row in rounds),
            }
            lines.append(
                f"  {name:23} {number:2}   {expected.bubble_fraction:6.2%}   {bubble:6.2%}   {ratio:5.3f}   "
                f"{figures[key]['step_ratio']:6.4f}   {figures[key]['longest_action']:5.2f}"
            )
    head = [
        f"(b) pipeline bubble, {RANKS} ranks, {1e3 * each_s:.0f} ms for F, I and W of a rank's stages",
        "  schedule       micro-batches   simulated measured  ratio   step     longest action",
    ]
    details = {"each_s": each_s, "schedules": figures, "rounds": rounds}
    return Section(bars, details, "\n".join([*head, *lines]))


def run(each_s: float, micro_batches: Sequence[int], num_rounds: int) -> list[dict[str, dict[str, float]]]:
    """All rounds, on each rank: what each schedule's step gave."""
    requests = {
        f"{name}, {number} micro-batches": _request(name, number, each_s)
        for name in SCHEDULES
        for number in micro_batches
    }
    pipelines = {key: _pipeline(schedule) for key, (schedule, _) in requests.items()}
    _set_priority(FIRST, [int(thread.name) for thread in Path("/proc/self/task").glob("*")])
    contestants = {
        key: partial(_step, _paced(pipelines[key], durations), schedule, durations)
        for key, (schedule, durations) in requests.items()
    }
    return alternate(contestants, num_rounds)


def _set_priority(priority: int, threads: Iterable[int]) -> bool:
    """Puts threads before all programs without a real-time priority; false where that is not allowed.

    On a machine with other work, a sleeper otherwise wakes up to 0.4 s late.
    """
    try:
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority))
    except (AttributeError, PermissionError):
        return False
    return True


def _step(pipeline: Pipeline, schedule: Schedule, durations: Durations) -> dict[str, float]:
    timeline = _timeline(pipeline, _micro_batches(schedule.num_microbatches), schedule)
    slots = [span.duration / durations.of[span.action.kind][0] for row in timeline.spans for span in row]
    return {"bubble": timeline.bubble_fraction, "step_s": timeline.makespan, "longest_action": max(slots)}


def _paced(pipeline: Pipeline, durations: Durations) -> Pipeline:
    stages = {index: _Paced(stage, durations.of, index) for index, stage in pipeline.stages.items()}
    return replace(pipeline, stages=stages)


def _request(name: str, number: int, each_s: float) -> tuple[Schedule, Durations]:
    schedule = generate(name, RANKS, number)
    return schedule, uniform(schedule.num_stages, *[each_s * RANKS / schedule.num_stages] * 3)


class _Paced(Stage):
    """A stage whose actions take a given time; the work of the stage is within it."""

    def __init__(self, stage: Stage, seconds, index: int):
        super().__init__(stage.part, stage.gradients)
        self._seconds = {kind: times[index] for kind, times in seconds.items()}

    def forward(self, *arguments) -> torch.Tensor:
        with self._lasting(Kind.FORWARD):
            return super().forward(*arguments)

    def backward(self, action: Action, grad_BTD: torch.Tensor | None) -> torch.Tensor | None:
        with self._lasting(action.kind):
            return super().backward(action, grad_BTD)

    @contextmanager
    def _lasting(self, kind: Kind) -> Iterator[None]:
        end = time.perf_counter() + self._seconds[kind]
        # What computes gives way to what another rank does between its actions, which is what is measured.
        _set_priority(SECOND, [0])
        yield
        is_first = _set_priority(FIRST, [0])
        time.sleep(max(0.0, end - WAKING_S - time.perf_counter()))
        while time.perf_counter() < end:
            if is_first:  # the others of its priority are ranks; else whoever came might stay
                os.sched_yield()


def _pipeline(schedule: Schedule) -> Pipeline:
    """This rank's stages, which have taken one step: what a first step prepares is no part of a step."""
    number = schedule.num_microbatches
    layout = [f"layout.pp={RANKS}", f"layout.pp_schedule={schedule.name}", f"data.global_batch={number}"]
    recipe, cpu = load("llama3-debug", [*SMALL, *layout]), torch.device("cpu")
    attend, _ = models.select("sdpa", cpu)
    mesh = build_mesh(recipe.layout, cpu, dist.get_rank())

    def build(part):
        return models.build(recipe.model, attend=attend, part=part)

    made = spread(recipe, mesh, build, precision.policy(recipe.precision), cpu)
    models.initialize(made.model, 0, holder(made.places))
    assert isinstance(made.passes, Pipeline)
    made.passes.forward_backward(_micro_batches(number), number)
    return made.passes


def _micro_batches(number: int) -> list[Batch]:
    tokens = torch.arange(number * 17).remainder(64).view(number, 1, 17)
    starts = torch.zeros(1, 16, dtype=torch.int32)
    return [Batch(row[:, :-1].contiguous(), row[:, 1:].contiguous(), starts) for row in tokens]


def _timeline(pipeline: Pipeline, batches: list[Batch], schedule: Schedule) -> Timeline:
    dist.barrier()
    origin = time.perf_counter()  # one clock for all processes of a machine, better than a barrier's precision
    watch = Measure(torch.device("cpu"))
    pipeline.forward_backward(batches, len(batches), watch=watch)
    rows: list = [None] * RANKS
    dist.all_gather_object(rows, [(span.action, origin + span.start, origin + span.end) for span in watch.spans()])
    return join(schedule.name, schedule.placement, [tuple(Span(*each) for each in row) for row in rows])
