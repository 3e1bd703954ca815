"""metrics.jsonl: one JSON object a line, always written; floats that must be compared bit for bit are there as hex too.

A run that resumes at step k first forgets what lies behind k, so that a killed and resumed run has the same rows as
one that ran through.
"""

import dataclasses
import json
import os
import time
from pathlib import Path

from drumline.train.records import (
    CommitRecord,
    EndRecord,
    Record,
    ReplayRecord,
    RouterRecord,
    StartRecord,
    StepRecord,
    TimelineRecord,
    ValidationRecord,
)

FILE_NAME = "metrics.jsonl"
_KINDS = {
    StartRecord: "start",
    StepRecord: "step",
    ValidationRecord: "validation",
    ReplayRecord: "replay",
    CommitRecord: "commit",
    EndRecord: "end",
}
_HEX = ("loss", "grad_norm", "mtp_loss")


class Journal:
    """Appends every record to a run's metrics.jsonl.

    Args:
        run_dir: the folder of the run.
        first_step: steps already taken; rows of later steps are dropped.
    """

    def __init__(self, run_dir: Path, first_step: int):
        path = run_dir / FILE_NAME
        if path.exists():
            _truncate(path, first_step)
        self._file = path.open("a", encoding="utf-8")

    def observe(self, record: Record) -> None:
        """Writes one row, at once; a timeline has a file of its own."""
        if isinstance(record, TimelineRecord):
            return
        self._file.write(json.dumps(to_row(record)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def to_row(record: Record) -> dict[str, object]:
    """A record as a row of metrics.jsonl."""
    row: dict[str, object] = {"kind": _KINDS[type(record)]}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, RouterRecord):
            value = {name: inner for name, inner in dataclasses.asdict(value).items() if inner is not None}
        elif value is None and field.name in ("router", "mtp_loss"):
            continue  # a dense model has no router, and most predict one token
        row[field.name] = str(value) if isinstance(value, Path) else value
        if field.name in _HEX and isinstance(value, float):
            row[f"{field.name}_hex"] = value.hex()
    row["time"] = time.time()
    return row


def _truncate(path: Path, first_step: int) -> None:
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that was being written when the run was killed
        if isinstance(row, dict) and row.get("step", 0) <= first_step:
            # What a run that starts over left behind says nothing about the new one.
            if first_step == 0 and row.get("kind") not in ("start", "end"):
                continue
            kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)
