"""The one line by which a peer's process says what it measured."""

import json
import statistics
from dataclasses import asdict, dataclass

MARK = "RESULT "


@dataclass(frozen=True)
class Result:
    """Times of the measured steps of one turn."""

    tokens_per_step: int
    wall_s: list[float]
    cpu_s: list[float]
    note: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / statistics.median(self.wall_s)

    def emit(self) -> None:
        """Prints the line."""
        print(MARK + json.dumps(asdict(self)), flush=True)


def read(output: str) -> Result | None:
    """The result among a process's output lines."""
    lines = [line[len(MARK) :] for line in output.splitlines() if line.startswith(MARK)]
    return Result(**json.loads(lines[-1])) if lines else None
