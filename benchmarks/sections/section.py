"""What a section of a benchmark gives back, and ranks to measure on."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Bar

TIMEOUT_S = 600


@dataclass(frozen=True)
class Section:
    """One claim, measured."""

    bars: Sequence[Bar]
    details: Mapping[str, object]
    table: str


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
