"""Records steps of training on one rank, at the level that is wanted, and writes a file a step.

hash      a 64-bit hash of every tensor's bits
stats     with it extremes, sums, and counts of what is not finite
tensors   the tensors
ops       the tensors, and what every operator inside chosen modules gave, as hashes and sums
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from drumline.capture.files import write
from drumline.capture.forcing import ForcedRouting
from drumline.capture.keys import INIT, LOSS, NORM, OPTIMIZER, WEIGHT, key
from drumline.capture.operator_watch import OperatorWatch
from drumline.capture.operators import write_operators
from drumline.capture.sink import OPS, TENSORS, Parts
from drumline.capture.snapshot import Subject, add_gradients, add_moments, add_weights
from drumline.capture.teacher import Teacher
from drumline.capture.tokens import Tokens
from drumline.capture.watch import ActivationWatch
from drumline.schedules import Action

CUTS = ("cp", "tp")
"""Axes whose ranks each compute a part of a module on a micro-batch."""


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
