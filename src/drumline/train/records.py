"""What a run reports: plain records, and the observers that receive them.

The loop knows no console, file or service; it hands each record to a list of observers.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from drumline.schedules import Timeline


@dataclass(frozen=True)
class StartRecord:
    """The loop is about to begin."""

    step: int  # steps already taken
    num_steps: int
    layout: str
    world: int
    resumed_from: Path | None
    attention: str
    peak_flops: float | None  # FLOP/s of all ranks together, for MFU
    recipe: str = ""  # digest of every value of the resolved recipe
    environment: str = ""  # digest of what may decide bits and is no part of the recipe
    data: str = ""  # digest of the training data


@dataclass(frozen=True)
class RouterRecord:
    """What the routers did in a step, over the global batch: one value a layer with experts."""

    layers: tuple[int, ...]  # their indices
    load_max: tuple[float, ...]  # choices of the most chosen expert over the mean; 1 is even
    load_min: tuple[float, ...]
    entropy: tuple[float, ...]  # of a token's probabilities over experts, mean, nats
    dropped: tuple[float, ...]  # share of choices that found no room
    load: tuple[tuple[int, ...], ...] | None  # choices of every expert, on steps that report them


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    step: int  # 1-based
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int  # valid tokens of the global batch
    tokens_per_s: float  # all tokens of the global batch
    mfu: float | None
    memory_bytes: int  # peak of rank 0: allocated on CUDA, resident on CPU
    step_s: float
    router: RouterRecord | None = None  # None for a dense model
    mtp_loss: float | None = None  # mean over the modules of multi-token prediction; None where there are none


@dataclass(frozen=True)
class TimelineRecord:
    """When each forward and backward of a step ran, on the ranks of one pipeline."""

    step: int
    timeline: Timeline


@dataclass(frozen=True)
class ValidationRecord:
    """One pass over the held-out batches."""

    step: int
    loss: float
    num_tokens: int


@dataclass(frozen=True)
class ReplayRecord:
    """A micro-batch was computed twice, with the same bits."""

    step: int
    num_digests: int  # that rank 0 compared
    replay_s: float


@dataclass(frozen=True)
class CommitRecord:
    """A checkpoint is durable."""

    step: int
    path: Path
    num_bytes: int  # of the commit's logical tensors; 0 on ranks other than 0
    stall_s: float  # that the loop waited


@dataclass(frozen=True)
class EndRecord:
    """The loop is over."""

    step: int
    reason: str  # done, stopped, preempted, failed


Record = StartRecord | StepRecord | TimelineRecord | ValidationRecord | ReplayRecord | CommitRecord | EndRecord


class Observer(Protocol):
    """Receives every record of a run, in order."""

    def observe(self, record: Record) -> None:
        """Takes one record; must not change the run."""
        ...

    def close(self) -> None:
        """The run is over, for whatever reason."""
        ...
