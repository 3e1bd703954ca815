"""Running a run again: what was recorded, where a replay begins, and where its bits first differ.

A replay writes into a folder of its own and leaves the run as it is. It begins from the seed, or at a commit of the
run; its losses and norms are compared with the recorded ones as bits.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.checkpoint.folder import Folder
from drumline.recipe import DrumlineError, Recipe, is_maths, load
from drumline.recipe.comparison import diff
from drumline.train import manifest
from drumline.train.folder import CHECKPOINTS
from drumline.train.journal import FILE_NAME

COMPARED = ("loss", "grad_norm", "mtp_loss")
_SIGNIFICAND_BITS = 52


class NotReproducibleError(DrumlineError):
    """A run cannot be replayed; the message says why."""


@dataclass(frozen=True)
class Recorded:
    """What a run wrote about itself.

    Attributes:
        folder: its directory.
        steps: its rows of steps, by step.
        starts: its rows of starts, in their order.
        environment: environment.json; empty where there is none.
    """

    folder: Path
    steps: Mapping[int, Mapping[str, Any]]
    starts: Sequence[Mapping[str, Any]]
    environment: Mapping[str, Any]

    @property
    def began_from_seed(self) -> bool:
        """Whether its first step followed from the seed alone, not from a commit."""
        return any(row.get("step") == 0 and row.get("resumed_from") is None for row in self.starts)


def read_recorded(folder: Path) -> Recorded:
    """Reads what a run wrote about itself.

    Args:
        folder: the run directory.

    Returns:
        The record.

    Raises:
        NotReproducibleError: it is no run directory, or holds no step.
    """
    if not (folder / "recipe.json").is_file():
        raise NotReproducibleError(
            f"{folder} cannot be reproduced: it has no recipe.json; give the directory of a run, such as runs/NAME"
        )
    rows = _read_rows(folder / FILE_NAME)
    steps = {row["step"]: row for row in rows if row.get("kind") == "step" and isinstance(row.get("loss_hex"), str)}
    if not steps:
        raise NotReproducibleError(f"{folder} cannot be reproduced: {FILE_NAME} has no step to compare with")
    environment = _read_json(folder / "environment.json")
    return Recorded(folder, steps, [row for row in rows if row.get("kind") == "start"], environment)


def parse_steps(text: str) -> tuple[int, int | None]:
    """Reads which steps are wanted.

    Args:
        text: `N` for the first N, `START:STOP` (1-based, both included), or empty for all.

    Returns:
        First and last; None: the last that was recorded.

    Raises:
        DrumlineError: it is neither.
    """
    if not text:
        return 1, None
    start, colon, stop = text.partition(":")
    numbers = (start, stop) if colon else ("1", start)
    if not all(part.isdigit() and int(part) > 0 for part in numbers) or int(numbers[0]) > int(numbers[1]):
        raise DrumlineError(f"--steps {text!r} names no steps; give N for the first N, or START:STOP such as 5:8")
    return int(numbers[0]), int(numbers[1])


@dataclass(frozen=True)
class Plan:
    """How a run is replayed.

    Attributes:
        recipe: of the replay; it writes to no place but its own folder.
        commit: it begins from; None: from the seed.
        first: step that is computed.
        last: step that is computed.
    """

    recipe: Recipe
    commit: Path | None
    first: int
    last: int


def plan(recorded: Recorded, wanted: tuple[int, int | None], changes: Sequence[str], folder: Path) -> Plan:
    """Decides how a run is replayed.

    Args:
        recorded: what the run wrote.
        wanted: first and last step, as `parse_steps` reads them.
        changes: `key=value` each; keys that define the run's maths may not change.
        folder: of the replay.

    Returns:
        The plan.

    Raises:
        RecipeError: the recorded recipe cannot be read by this drumline, or the changes are wrong.
        NotReproducibleError: steps were not recorded, nothing to begin from is left, or another run is asked for.
    """
    source, command = str(recorded.folder / "recipe.json"), "drumline reproduce"
    original, changed = load(source, command=command), load(source, changes, command=command)
    other = [each for each in diff(original, changed) if is_maths(each.key)]
    if other:
        lines = "".join(f"\n  {each.key}: {each.first!r} there, {each.second!r} here" for each in other)
        raise NotReproducibleError(f"another run would be computed: these keys define it{lines}\n  leave them out")
    newest = max(recorded.steps)
    last = newest if wanted[1] is None else wanted[1]
    missing = [step for step in range(wanted[0], last + 1) if step not in recorded.steps]
    if wanted[1] is not None and missing:
        raise NotReproducibleError(
            f"step {missing[0]} of {recorded.folder} was not recorded; it has steps {min(recorded.steps)} to {newest}"
        )
    commit, step = _begin(recorded, wanted[0], is_asked=wanted[1] is not None)
    recipe = load(source, [*changes, *_quiet(folder, last)], command=command)
    return Plan(recipe, commit, step + 1, last)


def _begin(recorded: Recorded, first: int, *, is_asked: bool) -> tuple[Path | None, int]:
    """The commit to begin from, None for the seed, and its step."""
    whole = [each for each in Folder(recorded.folder / CHECKPOINTS).found() if each.commit is not None]
    before = [each for each in whole if each.step < first]
    if before:
        return before[-1].path, before[-1].step
    if recorded.began_from_seed:
        return None, 0
    later = [each for each in whole if each.step < max(recorded.steps)]
    if later and not is_asked:
        return later[0].path, later[0].step
    left = f"; steps {later[0].step + 1} on can be: --steps {later[0].step + 1}:{max(recorded.steps)}" if later else ""
    raise NotReproducibleError(
        f"{recorded.folder} cannot be reproduced from step {first}: it began from a commit that is gone{left}"
    )


def _quiet(folder: Path, last: int) -> list[str]:
    """A replay saves nothing, validates nothing and tells nobody; none of it moves a bit of a step."""
    return [
        f"run.dir={folder}",
        f"run.stop_after={last}",
        "run.validation_batches=0",
        "run.profile=",
        "run.timeline=0",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
        "metrics.tensorboard=false",
        "metrics.wandb=",
        "metrics.peak=1",
        "resilience.max_restarts=0",
    ]


def prepare(folder: Path, commit: Path | None) -> None:
    """Makes the folder of a replay.

    Args:
        folder: new or empty.
        commit: to begin from.

    Raises:
        DrumlineError: the folder holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DrumlineError(f"{folder} is not empty; a replay wants a new folder: --keep elsewhere, or leave it out")
    (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    if commit is not None:
        (folder / CHECKPOINTS / commit.name).symlink_to(commit.resolve(), target_is_directory=True)


@dataclass(frozen=True)
class Compared:
    """One step, there and here.

    Attributes:
        step: its number.
        there: hexadecimal floats of the run, by what they are.
        here: of the replay.
    """

    step: int
    there: Mapping[str, str]
    here: Mapping[str, str]

    @property
    def differs(self) -> list[str]:
        """What differs; empty where all bits are the same."""
        return [name for name in self.there.keys() | self.here.keys() if self.there.get(name) != self.here.get(name)]

    @property
    def verdict(self) -> str:
        """`same`, or where the first bit differs."""
        return (
            ", ".join(f"{n} {_first_bit(self.there.get(n), self.here.get(n))}" for n in sorted(self.differs)) or "same"
        )


@dataclass(frozen=True)
class Verdict:
    """What came of a replay.

    Attributes:
        steps: in their order.
        environment: (key, value there, value here) of what may decide bits and differs.
    """

    steps: tuple[Compared, ...]
    environment: tuple[tuple[str, Any, Any], ...]

    @property
    def num_different(self) -> int:
        """Steps of which a bit differs."""
        return sum(bool(step.differs) for step in self.steps)


def compare(recorded: Recorded, replayed: Recorded, first: int, last: int) -> Verdict:
    """Holds a replay against the run.

    Args:
        recorded: the run.
        replayed: the replay.
        first: step that was computed.
        last: likewise.

    Returns:
        The verdict.

    Raises:
        NotReproducibleError: the replay read other data, or did not reach the last step.
    """
    data = [row["data"] for side in (recorded, replayed) for row in side.starts[-1:] if row.get("data")]
    if len(set(data)) > 1:
        raise NotReproducibleError(
            f"{recorded.folder} cannot be reproduced: its data has changed (digest {data[0]} there, {data[1]} now)"
        )
    if last not in replayed.steps:
        raise NotReproducibleError(f"the replay ended before step {last}; its messages above say why")
    there, here = recorded.steps, replayed.steps
    steps = tuple(
        Compared(step, _hex(there[step]), _hex(here[step])) for step in range(first, last + 1) if step in there
    )
    return Verdict(steps, tuple(manifest.differences(recorded.environment, replayed.environment)))


def _hex(row: Mapping[str, Any]) -> dict[str, str]:
    return {name: row[f"{name}_hex"] for name in COMPARED if f"{name}_hex" in row}


def _first_bit(there: str | None, here: str | None) -> str:
    if there is None or here is None:
        return "is not on both sides"
    one, other = (struct.unpack("<Q", struct.pack("<d", float.fromhex(text)))[0] for text in (there, here))
    equal = _SIGNIFICAND_BITS - (one ^ other).bit_length()
    return f"differs after {equal} of {_SIGNIFICAND_BITS} bits" if equal >= 0 else "differs in sign or exponent"


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that was being written when the run was killed
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
