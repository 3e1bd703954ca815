"""Holds layouts in exact mode against one rank, bit for bit: ten steps, everything that a step makes.

Losses and norms of each step, what modules give in the first, all gradients and all weights after each step.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from drumline.capture.keys import in_order, split_key
from drumline.capture.parts import Joined, same_bits
from drumline.comm.forked import ForkedRanks, in_one_line
from drumline.recipe import digest
from drumline.recipe.sections import Recipe
from drumline.verify.candidate import record_rank
from drumline.verify.run import TIMEOUT_S, Case, read_ranks, run_cases

NUM_STEPS = 10


@dataclass(frozen=True)
class ExactResult:
    """What became of a case.

    Attributes:
        case: the case.
        num_compared: tensors and scalars that were held against one rank's.
        num_different: those of them with other bits.
        first: the first of these, in the order in which a step makes them, `step/kind/name`; empty: none.
        why: how it differs, in words.
        failure: what the first rank that failed said; empty: none did.
        seconds: that its ranks ran.
    """

    case: Case
    num_compared: int
    num_different: int
    first: str
    why: str
    failure: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every bit is that of one rank."""
        return not self.failure and not self.num_different and self.num_compared > 0


def compare(found: Joined, one: Joined) -> tuple[int, str, str]:
    """Holds what a layout recorded against what one rank did.

    Args:
        found: joined over the ranks.
        one: of one rank.

    Returns:
        How many differ; the first, and how; both empty where none does.
    """
    unequal, missing = set(found.unequal), set(found.missing)
    wrong: dict[str, str] = {}
    for name in in_order({**one.tensors, **found.tensors}):
        mine, theirs = found.tensors.get(name), one.tensors.get(name)
        if mine is None or theirs is None or name in missing:
            wrong[name] = "no rank holds all of it" if theirs is not None else "one rank has no such tensor"
        elif name in unequal:
            wrong[name] = "ranks that hold the same elements of it differ in their bits"
        elif not same_bits(mine, theirs):
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                wrong[name] = "has another shape or dtype"
            elif mine.ndim == 0:
                wrong[name] = f"is {float(mine).hex()}, and {float(theirs).hex()} on one rank"
            else:
                share = (mine != theirs).double().mean()
                wrong[name] = f"differs in {share:.2%} of its elements, by {(mine - theirs).abs().max():.1e} at most"
    first = next(iter(wrong), "")
    return len(wrong), first, wrong.get(first, "")


def words(first: str) -> str:
    """A key for a reader: `step 3, gradient of layers.0.mlp.up_proj.weight`."""
    step, kind, name = split_key(first)
    return f"step {step}, {kind}" + (f" of {name}" if name else "")


def verify_exact(cases: Sequence[Case], *, max_ranks: int, num_steps: int = NUM_STEPS) -> Iterator[ExactResult]:
    """Verifies cases, one after another; what one rank computes is computed once for each model and precision.

    Ranks are forked from this process, which computes with one thread from then on.

    Args:
        cases: in exact mode.
        max_ranks: ranks that run at a time; a layout of more runs alone.
        num_steps: to train.

    Yields:
        A result a case, as they come.

    Raises:
        RuntimeError: one rank could not compute what it is held against.
    """
    with tempfile.TemporaryDirectory(prefix="drumline-verify-") as name:
        truths: dict[str, Joined] = {}
        record = functools.partial(record_rank, num_steps=num_steps)

        def prepare(recipe: Recipe) -> None:
            if digest(recipe) not in truths:
                truths[digest(recipe)] = _on_one_rank(recipe, Path(name) / f"one-{len(truths)}", record)

        for ran in run_cases(cases, Path(name), prepare, record, max_ranks=max_ranks):
            if ran.failure:
                yield ExactResult(ran.case, 0, 0, "", "", ran.failure, ran.seconds)
            else:
                one = truths[digest(ran.case.recipe)]
                yield ExactResult(ran.case, len(one.tensors), *compare(read_ranks(ran.folder), one), "", ran.seconds)


def _on_one_rank(recipe: Recipe, folder: Path, record: Callable[[Recipe, Path], None]) -> Joined:
    tree = recipe.model_dump()
    tree["layout"] = {}
    tree["memory"] |= {"activation_checkpointing": "none"}
    folder.mkdir()
    body = functools.partial(record, Recipe.model_validate(tree), folder)
    failures = ForkedRanks(1, body, TIMEOUT_S, log_dir=folder).wait()
    if failures:
        raise RuntimeError(f"one rank failed: {in_one_line(failures[0])}\n{failures[0]}")
    return read_ranks(folder)
