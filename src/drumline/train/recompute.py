"""Computing a micro-batch twice, and naming the rank whose bits differ: a check for silent data corruption.

A faulty core, memory cell or accelerator may give a wrong number now and then and report nothing. The same operators on
the same inputs give the same bits, so a second run that differs has found a fault. The ranks tell one another what
differed first on each, since one rank's wrong number soon is in the sums of all.
Sources: Dixit et al. 2021, arXiv:2102.11245 (silent data corruptions at scale); Llama 3, arXiv:2407.21783, section
3.3.4.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from drumline.data import Batch
from drumline.parallel import Gradients
from drumline.recipe.errors import CheckFailed
from drumline.train.step import Passes
from drumline.train.witness import Difference, Testimony, Witness


class SilentCorruptionError(CheckFailed):
    """The same computation gave other bits the second time; the message names the ranks and their hosts."""


@dataclass(frozen=True)
class Recomputed:
    """A check that found nothing.

    Attributes:
        num_digests: that were compared on this rank.
        seconds: that both runs took.
    """

    num_digests: int
    seconds: float


def compute_twice(
    step: int,
    batches: Sequence[Batch],
    num_tokens: int,
    *,
    model: nn.Module,
    passes: Passes,
    gradients: Gradients,
    gather: Callable[[object], list],
) -> Recomputed:
    """Runs forward and backward twice and compares all that was computed. All ranks must call it at once.

    It comes after a step, which has set up what is set up once. Weights and optimizer states are only read; the
    gradients are forgotten.

    Args:
        step: number of the step, for the message.
        batches: this rank's micro-batches that are computed.
        num_tokens: that the loss is divided by.
        model: whose weights are read.
        passes: takes micro-batches through the model.
        gradients: of the model.
        gather: every rank's value, on every rank.

    Returns:
        What was compared.

    Raises:
        SilentCorruptionError: something differed on any rank; raised on all.
    """
    begin = time.perf_counter()
    first = _observe(batches, num_tokens, model, passes, gradients)
    second = _observe(batches, num_tokens, model, passes, gradients)
    gradients.zero_grad()
    found = first.first_difference(second)
    reports = gather((socket.gethostname(), found))
    if any(difference is not None for _, difference in reports):
        raise SilentCorruptionError(explain(step, reports))
    return Recomputed(len(first.digests), time.perf_counter() - begin)


def _observe(
    batches: Sequence[Batch], num_tokens: int, model: nn.Module, passes: Passes, gradients: Gradients
) -> Testimony:
    gradients.zero_grad()
    witness = Witness([*model.parameters(), *model.buffers()])
    with witness:
        loss = passes.forward_backward(batches, num_tokens, watch=witness)
        gradients.finish()
    with torch.no_grad():
        witness.note_received("the loss", [loss])
        witness.note_received("gradients, summed over ranks", gradients.local())
    return witness.testimony()


def explain(step: int, reports: Sequence[tuple[str, Difference | None]]) -> str:
    """Says who is at fault.

    Args:
        step: number of the step.
        reports: of each rank its host, and where its two runs first differ.

    Returns:
        One message, the same on every rank.
    """
    found = [(rank, host, each) for rank, (host, each) in enumerate(reports) if each is not None]
    faulty = [(rank, host, each) for rank, host, each in found if each.role != "received"]
    head = f"step {step}: a micro-batch that was computed twice gave different bits; silent data corruption"
    if not faulty:
        ranks = ", ".join(f"rank {rank} on {host}" for rank, host, _ in found)
        return (
            f"{head}\n  no rank computed otherwise: what was received changed, at {ranks}: a link, or memory beside it"
        )
    lines = []
    for rank, host, each in faulty:
        how = "gave other results for the same inputs" if each.role == "result" else "read what had changed in memory"
        lines.append(f"\n  rank {rank} on {host}: {each.what} {how}")
    return f"{head}{''.join(lines)}\n  take the host out, then go on from the last commit before this step"
