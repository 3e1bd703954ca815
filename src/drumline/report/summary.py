"""A run in a few numbers: for the head of the report and for `--json`."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from drumline.report.run import Run


@dataclass(frozen=True)
class Summary:
    """A run in a few numbers; NaN where nothing was recorded.

    Attributes:
        name: the run's name.
        folder: its directory.
        status: `done`, `preempted`, `failed`, `unfinished` (no end was recorded: it runs still, or was killed) or
            `empty`.
        num_steps: steps done.
        planned_steps: steps that the recipe asks for; None where it is unknown.
        layout: how the run was spread, as a string.
        world: ranks.
        num_resumes: times that it went on from a commit.
        first_loss: training loss of the first step.
        last_loss: mean training loss of the last tenth of the steps (at most 50).
        first_validation_loss: before the first step.
        last_validation_loss: after the last.
        best_validation_loss: the least.
        validation_drop: share of the first validation loss that is gone at the last.
        num_tokens: valid tokens trained on.
        tokens_per_s: median over steps after the first.
        mfu: median model FLOP utilization over steps after the first.
        peak_memory_bytes: the most that rank 0 held.
        train_s: sum of the steps' times, seconds.
        stall_s: time that the loop waited for commits, seconds.
        num_checkpoints: whole commits in the folder.
        checkpoint_bytes: their size on disk.
        num_damaged_checkpoints: folders that bear a commit's name and are not whole.
        notes: what could not be read.
    """

    name: str
    folder: str
    status: str
    num_steps: int
    planned_steps: int | None
    layout: str
    world: int | None
    num_resumes: int
    first_loss: float
    last_loss: float
    first_validation_loss: float
    last_validation_loss: float
    best_validation_loss: float
    validation_drop: float
    num_tokens: float
    tokens_per_s: float
    mfu: float
    peak_memory_bytes: float
    train_s: float
    stall_s: float
    num_checkpoints: int
    checkpoint_bytes: int
    num_damaged_checkpoints: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The numbers as JSON values; NaN and infinities as null."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


def summarize(run: Run) -> Summary:
    """Counts a run up.

    Args:
        run: the run.

    Returns:
        Its numbers.
    """
    starts = [event.values for event in run.events if event.kind == "start"]
    loss, validation = run["loss"], run.validation_loss
    tail = min(50, max(1, len(loss) // 10))
    first, last = (validation[0], validation[-1]) if len(validation) else (math.nan, math.nan)
    whole = [checkpoint for checkpoint in run.checkpoints if checkpoint.is_whole]
    return Summary(
        name=run.name,
        folder=str(run.folder),
        status=_status(run),
        num_steps=int(run.step[-1]) if len(run.step) else 0,
        planned_steps=_planned_steps(run),
        layout=str(starts[-1].get("layout", "")) if starts else "",
        world=starts[-1].get("world") if starts and isinstance(starts[-1].get("world"), int) else None,
        num_resumes=sum(bool(start.get("resumed_from")) for start in starts),
        first_loss=float(loss[0]) if len(loss) else math.nan,
        last_loss=_over(np.mean, loss[-tail:]),
        first_validation_loss=float(first),
        last_validation_loss=float(last),
        best_validation_loss=_over(np.min, validation),
        validation_drop=float(1 - last / first) if len(validation) > 1 and first else math.nan,
        num_tokens=_over(np.sum, run["num_tokens"]),
        tokens_per_s=_over(np.median, _after_first(run["tokens_per_s"])),
        mfu=_over(np.median, _after_first(run["mfu"])),
        peak_memory_bytes=_over(np.max, run["memory_bytes"]),
        train_s=_over(np.sum, run["step_s"]),
        stall_s=math.fsum(_stalls(run)),
        num_checkpoints=len(whole),
        checkpoint_bytes=sum(checkpoint.num_bytes for checkpoint in whole),
        num_damaged_checkpoints=len(run.checkpoints) - len(whole),
        notes=run.notes,
    )


def _status(run: Run) -> str:
    marks = [event for event in run.events if event.kind in ("start", "end")]
    if marks and marks[-1].kind == "end":
        reason = marks[-1].values.get("reason")
        return reason if reason in ("done", "stopped", "preempted", "failed") else "unfinished"
    return "unfinished" if marks or len(run.step) else "empty"


def _planned_steps(run: Run) -> int | None:
    return run.recipe.run.steps if run.recipe is not None else None


def _stalls(run: Run) -> list[float]:
    found = [event.values.get("stall_s") for event in run.events if event.kind == "commit"]
    return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]


def _after_first(values: np.ndarray) -> np.ndarray:
    """The first step pays for warming up."""
    return values[1:] if len(values) > 1 else values


def _over(reduce: Any, values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(reduce(known)) if len(known) else math.nan
