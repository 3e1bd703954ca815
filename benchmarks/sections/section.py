"""What a section of a benchmark gives back, and ranks to measure on."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Bar, finish, parser, say

TIMEOUT_S = 600


@dataclass(frozen=True)
class Section:
    """One claim, measured."""

    bars: Sequence[Bar]
    details: Mapping[str, object]
    table: str


def run_sections(doc: str | None, sections: Mapping[str, Callable[[bool], Section]]) -> int:
    """The body of a benchmark that is made of sections.

    Args:
        doc: what `--help` says of it.
        sections: by name; called with whether the run is to be quick.

    Returns:
        The exit code: 0 where all bars hold, else 1.
    """
    options = parser(doc)
    options.add_argument("--only", default=",".join(sections), help="sections, by name")
    o = options.parse_args()
    wanted = o.only.split(",")
    unknown = [name for name in wanted if name not in sections]
    if unknown:
        options.error(f"no section {', '.join(unknown)}; there are {', '.join(sections)}")
    bars, details, tables = [], {}, []
    for name in wanted:
        say(f"section {name}")
        section = sections[name](o.quick)
        bars += section.bars
        details[name] = section.details
        tables.append(section.table)
    return finish(bars, {"sections": details}, "\n".join(tables), o.json)


def timed_together(body: Callable[[], object]) -> float:
    """Seconds that all ranks take for a call, which they begin together."""
    dist.barrier()
    start = time.perf_counter()
    body()
    dist.barrier()
    return time.perf_counter() - start


def on_ranks(num_ranks: int, body: Callable[..., Any], *arguments: object) -> Any:
    """Runs a module's function on ranks that have one thread each and meet through gloo.

    They are forked from a server that has imported torch, so that only the first ranks wait for that.

    Args:
        num_ranks: how many.
        body: called on each rank.
        arguments: its arguments.

    Returns:
        What rank 0's call returned, through JSON.
    """
    # A thread that spins while it waits would take the core of another rank.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    with tempfile.TemporaryDirectory(prefix="drumline-bench-") as folder:
        mp.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor"])
        mp.start_processes(_rank, (num_ranks, folder, body, arguments), nprocs=num_ranks, start_method="forkserver")
        return json.loads(Path(folder, "result").read_text())


def _rank(rank: int, num_ranks: int, folder: str, body: Callable[..., object], arguments: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=TIMEOUT_S))
    result = body(*arguments)
    dist.barrier()
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))
    dist.destroy_process_group()
