"""Verifying several layouts at a time: references first, then ranks as cores allow, each verdict as it comes."""

import functools
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from drumline.capture.files import read
from drumline.capture.parts import Joined, join
from drumline.comm.forked import ForkedRanks, in_one_line
from drumline.numerics import kernels
from drumline.recipe.sections import Recipe
from drumline.verify.candidate import record_rank
from drumline.verify.judge import Verdict, judge
from drumline.verify.reference import Reference, read_reference, write_reference

TIMEOUT_S = 120.0
PAUSE_S = 0.005


@dataclass(frozen=True)
class Case:
    """A layout to verify.

    Attributes:
        name: what it is called.
        model: what its model is called.
        recipe: small, without problems.
    """

    name: str
    model: str
    recipe: Recipe


@dataclass(frozen=True)
class Result:
    """What became of a case.

    Attributes:
        case: the case.
        verdict: None where ranks failed.
        failure: what the first rank that failed said; empty: none did.
        seconds: that its ranks ran.
    """

    case: Case
    verdict: Verdict | None
    failure: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the layout computes what one device computes."""
        return self.verdict is not None and self.verdict.ok


class References:
    """What one device computes, once for each model, tokens and precision.

    Args:
        folder: holds the results.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._read: dict[str, Reference] = {}

    def get(self, recipe: Recipe) -> Reference:
        """The reference of a recipe: computed in a process of its own where it is not there yet.

        Args:
            recipe: small; its layout does not matter.

        Returns:
            The reference.

        Raises:
            RuntimeError: it could not be computed.
        """
        name = self._name(recipe)
        if name not in self._read:
            folder = self._folder / name
            folder.mkdir(parents=True)
            failures = ForkedRanks(1, functools.partial(write_reference, recipe, folder), TIMEOUT_S).wait()
            if failures:
                raise RuntimeError(f"the reference on one device failed: {in_one_line(failures[0])}\n{failures[0]}")
            self._read[name] = read_reference(folder)
        return self._read[name]

    @staticmethod
    def _name(recipe: Recipe) -> str:
        data = recipe.data
        sections = (recipe.model, recipe.optimizer, recipe.precision)
        rest = (data.seq_len, data.global_batch, data.document_mask, recipe.run.seed)
        text = " ".join(section.model_dump_json() for section in sections) + repr(rest)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def verify(cases: Sequence[Case], *, max_ranks: int, references: References | None = None) -> Iterator[Result]:
    """Verifies cases.

    Ranks are forked from this process, which computes with one thread from then on.

    Args:
        cases: the layouts.
        max_ranks: ranks that run at a time; a layout of more runs alone.
        references: of earlier calls; None: new ones.

    Yields:
        A result a case, as they come.
    """
    kernels.available()  # built here once, not by every rank at a time
    with tempfile.TemporaryDirectory(prefix="drumline-verify-") as name:
        known = references or References(Path(name) / "references")
        waiting = list(enumerate(cases))
        running: list[_Running] = []
        try:
            while waiting or running:
                while waiting and _fits(waiting[0][1], running, max_ranks):
                    index, case = waiting.pop(0)
                    known.get(case.recipe)
                    running.append(_Running(case, Path(name) / str(index)))
                time.sleep(PAUSE_S)
                ended = [one for one in running if one.ranks.poll()]
                running = [one for one in running if one not in ended]
                for one in ended:
                    yield one.result(known.get(one.case.recipe))
        finally:
            for one in running:
                one.ranks.kill()


class _Running:
    def __init__(self, case: Case, folder: Path):
        folder.mkdir()
        self.case, self.folder, self._began = case, folder, time.monotonic()
        body: Callable[[], None] = functools.partial(record_rank, case.recipe, folder)
        self.ranks = ForkedRanks(case.recipe.layout.num_ranks, body, TIMEOUT_S, log_dir=folder)

    def result(self, reference: Reference) -> Result:
        seconds = time.monotonic() - self._began
        if self.ranks.failures:
            return Result(self.case, None, self.ranks.failures[0], seconds)
        verdict = judge(read_ranks(self.folder), reference, self.case.recipe.precision.compute)
        return Result(self.case, verdict, "", seconds)


def read_ranks(folder: Path) -> Joined:
    """What the ranks of a layout recorded, joined."""
    return join(read(path) for path in sorted(folder.glob("rank-*.safetensors")))


def _fits(case: Case, running: Sequence[_Running], max_ranks: int) -> bool:
    busy = sum(one.ranks.num_ranks for one in running)
    return not running or busy + case.recipe.layout.num_ranks <= max_ranks
