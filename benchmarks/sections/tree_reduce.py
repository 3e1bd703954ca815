"""An all-reduce in the order of the tree beside gloo's own, on four ranks with one thread each; bytes are counted."""

import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from harness import Bar, alternate, median_of, paired_ratio

from drumline.comm import Owners, tree_all_reduce
from sections.section import Section, on_ranks

RANKS, BAR = 4, 1 / 1.25
MIB = {False: (8, 32, 128), True: (32,)}
ROUNDS = {False: 15, True: 7}


def measure(quick: bool) -> Section:
    """Measures; `quick` takes one size and fewer rounds."""
    found = {size: on_ranks(RANKS, run, size, ROUNDS[quick]) for size in MIB[quick]}
    bars, lines = [], [f"tree_reduce: an all-reduce of fp32 on {RANKS} ranks"]
    for size, row in found.items():
        ratio = paired_ratio(row["rounds"], "gloo", "tree")
        times = "   ".join(f"{name} {1e3 * median_of(row['rounds'], name):6.1f} ms" for name in ("gloo", "tree"))
        lines.append(f"  {size:4} MiB  {times}   ratio {ratio:4.2f}   sent a rank {row['sent']:,} bytes")
        if size >= 32:
            bars.append(Bar(f"{size} MiB: speed of the tree over gloo's all-reduce", ratio, BAR))
        ring = 2 * (RANKS - 1) * (size << 20) // RANKS
        bars.append(Bar(f"{size} MiB: bytes of a ring over bytes sent", ring / row["sent"], 1.0))
    return Section(bars, {"sizes": found}, "\n".join(lines))


def run(mib: int, num_rounds: int) -> dict[str, object]:
    """All rounds of a size, on each rank; seconds of an all-reduce, and bytes that this rank sends in one."""
    owners = Owners(tuple(range(rank, rank + 1) for rank in range(RANKS)))
    tensors = {name: torch.randn(mib << 18, generator=torch.Generator().manual_seed(0)) for name in ("gloo", "tree")}
    bodies = {
        "gloo": partial(dist.all_reduce, tensors["gloo"]),
        "tree": partial(tree_all_reduce, [tensors["tree"]], owners, dist.group.WORLD),
    }
    sent = 0
    real = dist.batch_isend_irecv

    def count(operations):
        nonlocal sent
        sent += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return real(operations)

    with mock.patch.object(dist, "batch_isend_irecv", count):
        bodies["tree"]()
    bodies["gloo"]()
    if not torch.allclose(tensors["gloo"], tensors["tree"]):
        raise SystemExit("the sums differ")
    rounds = alternate({name: partial(_timed, body, tensors[name]) for name, body in bodies.items()}, num_rounds)
    return {"rounds": rounds, "sent": sent}


def _timed(body: Callable[[], object], tensor: torch.Tensor) -> float:
    tensor.fill_(1.0)  # sums of sums would overflow
    dist.barrier()
    start = time.perf_counter()
    body()
    dist.barrier()
    return time.perf_counter() - start
