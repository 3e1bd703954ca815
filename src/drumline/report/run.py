"""Reading a run directory: what is there is shown, what is damaged is noted, and nothing is changed.

A run that is killed may leave half a line behind, and one from another version rows of another shape. Such lines are
counted and named; the others are good.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from drumline.recipe import DrumlineError, Recipe, to_toml
from drumline.report.checkpoints import Checkpoint, read_checkpoints
from drumline.report.routers import router_columns

METRICS = "metrics.jsonl"
COLUMNS = ("loss", "mtp_loss", "grad_norm", "lr", "num_tokens", "tokens_per_s", "mfu", "memory_bytes", "step_s", "time")


class ReportError(DrumlineError):
    """The folder is no run directory, or the report cannot be written."""


@dataclass(frozen=True)
class Event:
    """Something that happened to the run: a start, a resume, a commit, an end.

    Attributes:
        kind: `start`, `commit` or `end`.
        step: steps done by then.
        time: seconds since 1970; NaN where unknown.
        values: the whole row.
    """

    kind: str
    step: int
    time: float
    values: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run directory holds.

    Attributes:
        folder: the directory.
        name: the run's name.
        step: [N] int64, numbers of the steps, rising.
        columns: each of `COLUMNS`, and those of `router_columns`, as [N] float64; NaN where a row has no such number.
        validation_step: [M] int64, steps before which the validation ran.
        validation_loss: [M] float64.
        events: in the order in which they were written.
        recipe: recipe.json; None where it is missing, damaged or of another version of drumline.
        recipe_text: the same as TOML, or as the JSON that it is; empty where it is missing or damaged.
        environment: environment.json; empty where it is missing or damaged.
        checkpoints: what lies in the folder of checkpoints.
        notes: what could not be read, in sentences.
    """

    folder: Path
    name: str
    step: np.ndarray
    columns: dict[str, np.ndarray]
    validation_step: np.ndarray
    validation_loss: np.ndarray
    events: tuple[Event, ...] = ()
    recipe: Recipe | None = None
    recipe_text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    checkpoints: tuple[Checkpoint, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, column: str) -> np.ndarray:
        return self.columns[column]


def read_run(folder: Path) -> Run:
    """Reads a run directory.

    Args:
        folder: the directory that `drumline train` wrote.

    Returns:
        What is there; a run without steps is a run.

    Raises:
        ReportError: the folder does not exist, or nothing in it comes from a run.
    """
    if not folder.exists():
        raise ReportError(f"{folder} does not exist; the report wants a run's directory, runs/NAME by default")
    if not folder.is_dir():
        raise ReportError(f"{folder} is a file; the report wants the run's directory, such as runs/NAME")
    if not any((folder / name).exists() for name in (METRICS, "recipe.json", "checkpoints")):
        inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
        hint = f"; runs in it: {', '.join(inside[:8])}" if inside else ""
        raise ReportError(f"{folder} is not a run's directory: it has no {METRICS}, recipe.json or checkpoints{hint}")
    notes: list[str] = []
    recipe, recipe_text = _read_recipe(folder / "recipe.json", notes)
    environment = _read_json(folder / "environment.json", notes)
    rows = list(_read_rows(folder / METRICS, notes))
    step, columns = _steps([row for row in rows if row.get("kind") == "step"])
    validation = {row["step"]: _number(row.get("loss")) for row in rows if row.get("kind") == "validation"}
    events = tuple(
        Event(row["kind"], row["step"], _number(row.get("time")), row)
        for row in rows
        if row.get("kind") in ("start", "commit", "end")
    )
    return Run(
        folder=folder,
        name=(recipe and recipe.run.name) or folder.resolve().name,
        step=step,
        columns=columns,
        validation_step=np.array(sorted(validation), dtype=np.int64),
        validation_loss=np.array([validation[key] for key in sorted(validation)], dtype=np.float64),
        events=events,
        recipe=recipe,
        recipe_text=recipe_text,
        environment=environment,
        checkpoints=read_checkpoints(folder / "checkpoints"),
        notes=tuple(notes),
    )


def _read_recipe(path: Path, notes: list[str]) -> tuple[Recipe | None, str]:
    tree = _read_json(path, notes)
    if not tree:
        return None, ""
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        notes.append(f"{path.name} is of another version of drumline ({key}: {error.errors()[0]['msg']})")
        return None, json.dumps(tree, indent=2)
    return recipe, to_toml(recipe)


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} holds no table")
        return {}
    return value


def _read_rows(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The rows that have a kind and a step; the other lines are noted."""
    damaged: list[int] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                row = _parse(line)
                if row is not None:
                    yield row
                elif line.strip():
                    damaged.append(number)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing: the run took no step yet")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error}")
    if damaged:
        where = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
        plural = "s" if len(damaged) > 1 else ""
        notes.append(f"{path.name}: {len(damaged)} line{plural} left out as unreadable (line{plural} {where})")


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    has_step = isinstance(row, dict) and isinstance(row.get("step"), int) and not isinstance(row["step"], bool)
    return row if has_step and isinstance(row.get("kind"), str) and 0 <= row["step"] < 2**62 else None


def _steps(rows: list[dict[str, Any]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    by_step = {row["step"]: row for row in rows}  # a step that was written twice counts as it was written last
    ordered = [by_step[step] for step in sorted(by_step)]
    columns = {name: np.array([_number(row.get(name)) for row in ordered], dtype=np.float64) for name in COLUMNS}
    return np.array(sorted(by_step), dtype=np.int64), columns | router_columns(ordered)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan
