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
    with tempfile.TemporaryDirectory(prefix="drumline-verify-") as name:
        known = references or References(Path(name) / "references")
        for ran in run_cases(cases, Path(name), known.get, record_rank, max_ranks=max_ranks):
            if ran.failure:
                yield Result(ran.case, None, ran.failure, ran.seconds)
            else:
                reference = known.get(ran.case.recipe)
                verdict = judge(read_ranks(ran.folder), reference, ran.case.recipe.precision.compute)
                yield Result(ran.case, verdict, "", ran.seconds)


@dataclass(frozen=True)
class Ran:
    """A case whose ranks have ended.

    Attributes:
        case: the case.
        folder: what its ranks recorded.
        failure: what the first rank that failed said; empty: none did.
        seconds: that its ranks ran.
    """

    case: Case
    folder: Path
    failure: str
    seconds: float


def run_cases(
    cases: Sequence[Case],
    folder: Path,
    prepare: Callable[[Recipe], object],
    record: Callable[[Recipe, Path], None],
    *,
    max_ranks: int,
) -> Iterator[Ran]:
    """Runs the ranks of cases, in their order, as many at a time as may run.

    Args:
        cases: the layouts.
        folder: gets a folder a case.
        prepare: is called before a case starts.
        record: runs on each rank, with the recipe and the folder of its case.
        max_ranks: ranks that run at a time; a layout of more runs alone.

    Yields:
        Each case when its ranks have ended.
    """
    kernels.available()  # built here once, not by every rank at a time
    waiting = list(enumerate(cases))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and _fits(waiting[0][1], running, max_ranks):
                index, case = waiting.pop(0)
                prepare(case.recipe)
                running.append(_Running(case, folder / str(index), record))
            time.sleep(PAUSE_S)
            ended = [one for one in running if one.ranks.poll()]
            running = [one for one in running if one not in ended]
            yield from (one.ended() for one in ended)
    finally:
        for one in running:
            one.ranks.kill()


class _Running:
    def __init__(self, case: Case, folder: Path, record: Callable[[Recipe, Path], None]):
        folder.mkdir()
        self.case, self._folder, self._began = case, folder, time.monotonic()
        body: Callable[[], None] = functools.partial(record, case.recipe, folder)
        self.ranks = ForkedRanks(case.recipe.layout.num_ranks, body, TIMEOUT_S, log_dir=folder)

    def ended(self) -> Ran:
        return Ran(self.case, self._folder, next(iter(self.ranks.failures), ""), time.monotonic() - self._began)


def read_ranks(folder: Path) -> Joined:
    """What the ranks of a layout recorded, joined."""
    return join(read(path) for path in sorted(folder.glob("rank-*.safetensors")))


def _fits(case: Case, running: Sequence[_Running], max_ranks: int) -> bool:
    busy = sum(one.ranks.num_ranks for one in running)
    return not running or busy + case.recipe.layout.num_ranks <= max_ranks
