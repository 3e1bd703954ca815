"""Records steps of training on one rank, at the level that is wanted, and writes a file a step.

hash      a 64-bit hash of every tensor's bits
stats     with it extremes, sums, and counts of what is not finite
tensors   the tensors
ops       the tensors, and what every operator inside chosen modules gave, as hashes and sums
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from drumline.capture.digest import digest, starts_of_box, starts_of_rows
from drumline.capture.files import write
from drumline.capture.forcing import ForcedRouting
from drumline.capture.keys import INIT, LOSS, NORM, OPTIMIZER, WEIGHT, is_wanted, key, split_key
from drumline.capture.operator_watch import OperatorWatch
from drumline.capture.operators import write_operators
from drumline.capture.parts import Part, scalar
from drumline.capture.snapshot import Subject, add_gradients, add_moments, add_weights
from drumline.capture.teacher import Teacher
from drumline.capture.tokens import Tokens
from drumline.capture.watch import ActivationWatch
from drumline.schedules import Action

HASH, STATS, TENSORS, OPS = "hash", "stats", "tensors", "ops"
LEVELS = (HASH, STATS, TENSORS, OPS)
WITH_ELEMENTS = frozenset((TENSORS, OPS))


CUTS = ("cp", "tp")
"""Axes whose ranks each compute a part of a module on a micro-batch."""


class Parts:
    """A sink that keeps parts.

    Args:
        level: of `LEVELS`.
        only: patterns of names; empty: all.
    """

    def __init__(self, level: str = TENSORS, only: Sequence[str] = ()):
        self.parts: list[Part] = []
        self._level, self._only = level, tuple(only)
        self._starts: dict[tuple, torch.Tensor] = {}
        self._empty: dict[tuple, torch.Tensor] = {}

    def add(
        self,
        key: str,
        shape: tuple[int, ...],
        tensor: torch.Tensor,
        *,
        offsets: tuple[int, ...] = (),
        rows_N: torch.Tensor | None = None,
        microbatch: int = -1,
    ) -> None:
        """As `Sink`."""
        if not is_wanted(split_key(key)[2], self._only):
            return
        if self._level in WITH_ELEMENTS:
            self.parts.append(Part(key, shape, tensor.to("cpu", copy=True), offsets, rows_N, microbatch))
            return
        starts_R = self._starts_of(shape, offsets, tuple(tensor.shape), rows_N)
        found = digest(tensor, starts_R, with_statistics=self._level == STATS)
        like = tensor.shape, tensor.dtype
        if like not in self._empty:
            self._empty[like] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self.parts.append(Part(key, shape, self._empty[like], offsets, rows_N, microbatch, found))

    def take(self) -> list[Part]:
        """Gives what was kept, and keeps it no longer."""
        parts, self.parts = self.parts, []
        return parts

    def add_scalar(self, name: str, value: float) -> None:
        """Keeps a number that every rank has."""
        part = scalar(name, value)
        self.add(name, (), part.tensor)

    def _starts_of(
        self, shape: tuple[int, ...], offsets: tuple[int, ...], size: tuple[int, ...], rows_N: torch.Tensor | None
    ) -> torch.Tensor:
        asked = (shape, offsets, size) if rows_N is None else (id(rows_N), shape[1])
        if asked not in self._starts:  # rows live as long as the tokens of the rank do
            self._starts[asked] = (
                starts_of_box(shape, offsets, size) if rows_N is None else starts_of_rows(rows_N, shape[1])
            )
        return self._starts[asked]


class Recorder:
    """Records the steps that are wanted; between them it does nothing, and no hook is there.

    Args:
        subject: the model in its layout.
        tokens: of this rank.
        steps: to be recorded, from 1.
        folder: gets a folder a step with a file a rank.
        level: of `LEVELS`.
        only: patterns of names of modules and parameters; empty: all.
        forced: replaces the choices of routers; None: they stay.
        teacher: replaces what was recorded by what another capture has; None: it stays.
    """

    def __init__(
        self,
        subject: Subject,
        tokens: Tokens,
        *,
        steps: Collection[int],
        folder: Path,
        level: str = TENSORS,
        only: Sequence[str] = (),
        forced: ForcedRouting | None = None,
        teacher: Teacher | None = None,
    ):
        self._subject, self._steps, self._folder = subject, frozenset(steps), folder
        self._sink = Parts(level, only)
        self._teacher = teacher
        # A teacher replaces the outputs of modules that are not recorded, too; the sink leaves those out.
        watched = only if teacher is None else ()
        self._watch = ActivationWatch(subject.model, tokens, self._sink, only=watched, forced=forced, teacher=teacher)
        self._operators: OperatorWatch | None = None
        if level == OPS:
            place = "".join(f".{axis}{subject.mesh.coordinate(axis)}" for axis in CUTS if subject.mesh.degree(axis) > 1)
            self._operators = OperatorWatch(subject.model, only=only, first=tokens.first, place=place)
        self._step = 0

    def wants(self, step: int) -> bool:
        """Whether a step is recorded."""
        return step in self._steps

    def start(self, step: int) -> None:
        """Before a step that is wanted."""
        self._step = step
        if step == min(self._steps):
            add_weights(self._sink, self._subject, step - 1, INIT)
            add_moments(self._sink, self._subject, step - 1, INIT)
            if self._teacher is not None:
                self._teacher.give_state(self._subject, step)
        self._watch.start(step)
        if self._operators is not None:
            self._operators.start(step)

    def begin(self, action: Action) -> None:
        """A forward or backward of a micro-batch starts."""
        self._watch.begin(action)
        if self._operators is not None:
            self._operators.begin(action)

    def end(self) -> None:
        """It has ended."""
        self._watch.end()

    def reduced(self, loss: float, norm: float) -> None:
        """Gradients have their sums, and nothing has been clipped.

        Args:
            loss: over the global batch.
            norm: of all gradients.
        """
        self._stop_watching()
        self._sink.add_scalar(key(self._step, LOSS), loss)
        self._sink.add_scalar(key(self._step, NORM), norm)
        add_gradients(self._sink, self._subject, self._step)
        if self._teacher is not None:
            self._teacher.give_gradients(self._subject, self._step)

    def finish(self) -> None:
        """After the step: takes the new state and writes the file of the step."""
        self._stop_watching()
        add_moments(self._sink, self._subject, self._step, OPTIMIZER)
        add_weights(self._sink, self._subject, self._step, WEIGHT)
        folder = step_folder(self._folder, self._step)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._subject.mesh.rank:05d}.safetensors"
        write(self._sink.take(), folder / f"rank-{name}")
        if self._operators is not None:
            write_operators(self._operators.take(), folder / f"ops-{name}")

    def _stop_watching(self) -> None:
        if self._operators is not None:
            self._operators.stop()
        self._watch.stop()


def step_folder(folder: Path, step: int) -> Path:
    """Where the files of a step lie in a capture."""
    return folder / f"step-{step:08d}"
