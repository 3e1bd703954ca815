"""Optional observers: TensorBoard, Weights & Biases, a Chrome trace of chosen steps, a timed step of a pipeline."""

from pathlib import Path
from typing import Any

import torch

from drumline.recipe.errors import DrumlineError
from drumline.schedules import timeline_to_json
from drumline.train.records import (
    Record,
    RouterRecord,
    StartRecord,
    StepRecord,
    TimelineRecord,
    ValidationRecord,
)

_SCALARS = ("loss", "mtp_loss", "grad_norm", "lr", "tokens_per_s", "mfu", "memory_bytes", "step_s")


class MissingExtraError(DrumlineError):
    """A recipe asks for a service whose library is not installed."""


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record by the name under which trackers show them; empty for records without any."""
    if isinstance(record, StepRecord):
        named = {f"train/{name}": getattr(record, name) for name in _SCALARS}
        return {name: value for name, value in named.items() if value is not None} | _router_scalars(record.router)
    return {"validation/loss": record.loss} if isinstance(record, ValidationRecord) else {}


def _router_scalars(router: RouterRecord | None) -> dict[str, float]:
    """The worst layer's load, and means over layers of the rest."""
    if router is None:
        return {}
    num_layers = len(router.layers)
    return {
        "router/load_max": max(router.load_max),
        "router/load_min": min(router.load_min),
        "router/entropy": sum(router.entropy) / num_layers,
        "router/dropped": sum(router.dropped) / num_layers,
    }


class TensorBoard:
    """Writes TensorBoard events into `<run>/tensorboard`.

    Args:
        run_dir: the run directory.
        first_step: steps taken so far; what a killed run wrote behind them is hidden.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, run_dir: Path, first_step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError(
                "metrics.tensorboard = true needs a library: pip install 'drumline[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)

    def observe(self, record: Record) -> None:
        """Writes a record's numbers."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WeightsAndBiases:
    """Logs to a Weights & Biases project.

    Args:
        run_dir: the run directory.
        project: its name.
        name: of the run.
        config: the resolved recipe.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, run_dir: Path, project: str, name: str, config: dict[str, Any]):
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError:
            raise MissingExtraError(
                f"metrics.wandb = {project!r} needs a library: pip install 'drumline[wandb]'"
            ) from None
        self._run = wandb.init(project=project, name=name, dir=str(run_dir), config=config, resume="allow")

    def observe(self, record: Record) -> None:
        """Logs a record's numbers at its step."""
        numbers = scalars(record)
        if numbers:
            self._run.log(numbers, step=record.step)

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


class ChromeTrace:
    """Traces steps with torch's profiler and writes `<run>/profile/steps-A-B-rank-R.json`, to open in Perfetto or
    Chrome.

    Args:
        run_dir: the run directory.
        first: first traced step, 1-based.
        last: last traced step.
        rank: this rank.
    """

    def __init__(self, run_dir: Path, first: int, last: int, rank: int):
        self._path = run_dir / "profile" / f"steps-{first}-{last}-rank-{rank}.json"
        self._first, self._last = first, last
        self._profiler: torch.profiler.profile | None = None

    def observe(self, record: Record) -> None:
        """Starts before the first traced step and writes after the last."""
        if isinstance(record, StartRecord | StepRecord):
            if record.step >= self._last:
                self.close()
            elif record.step >= self._first - 1 and self._profiler is None:
                self._profiler = torch.profiler.profile(record_shapes=True)
                self._profiler.start()

    def close(self) -> None:
        """Writes the trace, if one was begun."""
        if self._profiler is not None:
            self._profiler.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._path))
            self._profiler = None


class TimelineFile:
    """Writes a timed step into `<run>/pipeline.json`, which `drumline simulate schedule --measured` draws.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path):
        self._path = run_dir / "pipeline.json"

    def observe(self, record: Record) -> None:
        """Writes a timeline."""
        if isinstance(record, TimelineRecord):
            self._path.write_text(timeline_to_json(record.timeline), encoding="utf-8")

    def close(self) -> None:
        """Nothing is open."""


def parse_range(text: str) -> tuple[int, int]:
    """Reads `START:STOP` (steps, 1-based, both included)."""
    first, last = text.split(":")
    return int(first), int(last)
