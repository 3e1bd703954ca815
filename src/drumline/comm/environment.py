"""The one place above the torch line that reads the process environment: which rank this process is.

`torchrun` and drumline's own launcher set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; SLURM sets
SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID in each task of a step, and the first host of its node list serves as
the meeting point.
"""

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from drumline.recipe.errors import DrumlineError

DEFAULT_PORT = 29400


class PlaceError(DrumlineError):
    """The environment names a rank only in part, or with values that cannot be."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks of a run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    attempt: int = 0
    has_agent_store: bool = False  # torch's elastic agent hosts the store that ranks meet through; else rank 0 does
    source: str = "alone"


def read_place(environ: Mapping[str, str] | None = None) -> Place:
    """Reads this process's place.

    Args:
        environ: the variables; the process's own when absent.

    Returns:
        The place; rank 0 of 1 when nothing says otherwise.

    Raises:
        PlaceError: a variable is missing beside the others, is no whole number, or the rank is outside the world.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ or "WORLD_SIZE" in environ:
        place = _from_torchrun(environ)
    elif _is_slurm_step(environ):
        place = _from_slurm(environ)
    else:
        return Place()
    if not 0 <= place.rank < place.world_size:
        raise PlaceError(f"rank {place.rank} is outside a world of {place.world_size} ({place.source})")
    return place


def set_defaults(defaults: Mapping[str, str], environ: MutableMapping[str, str] | None = None) -> None:
    """Sets variables that libraries read at start, where the user has not set them."""
    environ = os.environ if environ is None else environ
    for name, value in defaults.items():
        environ.setdefault(name, value)


def export(variables: Mapping[str, str], environ: MutableMapping[str, str] | None = None) -> None:
    """Sets variables in this process: the place that the launcher gives a rank, whatever it inherited."""
    (os.environ if environ is None else environ).update(variables)


def read_num_threads(environ: Mapping[str, str] | None = None) -> int | None:
    """CPU threads that the user asks of OpenMP; None where nothing (or no whole number) is said."""
    text = (os.environ if environ is None else environ).get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(text) if text.isdigit() and int(text) > 0 else None


def read_variables(
    prefixes: Sequence[str], leave_out: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables that begin with one of some prefixes.

    Args:
        prefixes: of their names; nothing else is read, so that no secret gets into a record.
        leave_out: prefixes of names that are left out all the same.
        environ: the variables; the process's own when absent.

    Returns:
        Name -> value, by name.
    """
    environ = os.environ if environ is None else environ
    names = (name for name in environ if name.startswith(tuple(prefixes)) and not name.startswith(tuple(leave_out)))
    return {name: environ[name] for name in sorted(names)}


def _from_torchrun(environ: Mapping[str, str]) -> Place:
    world_size = _whole(environ, "WORLD_SIZE")
    return Place(
        rank=_whole(environ, "RANK"),
        local_rank=_whole(environ, "LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=_whole(environ, "LOCAL_WORLD_SIZE", world_size),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_whole(environ, "MASTER_PORT", DEFAULT_PORT),
        attempt=_whole(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        has_agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        source="torchrun",
    )


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    # A batch script has SLURM_PROCID=0 and the job's SLURM_NTASKS too, although it is one process: only srun makes
    # a step.
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"
    return "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and num_tasks.isdigit() and int(num_tasks) > 1


def _from_slurm(environ: Mapping[str, str]) -> Place:
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    job = _whole(environ, "SLURM_JOB_ID", 0)
    per_node = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1")
    return Place(
        rank=_whole(environ, "SLURM_PROCID"),
        local_rank=_whole(environ, "SLURM_LOCALID", 0),
        world_size=_whole(environ, "SLURM_STEP_NUM_TASKS", _whole(environ, "SLURM_NTASKS", 1)),
        local_world_size=int(per_node[0]) if per_node else 1,
        master_addr=environ.get("MASTER_ADDR") or first_host(hosts),
        # Jobs that share a node must not meet on one port.
        master_port=_whole(environ, "MASTER_PORT", 15000 + job % 15000),
        attempt=_whole(environ, "SLURM_RESTART_COUNT", 0),
        source="slurm",
    )


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list such as `gpu[003-006,010],login1` (here `gpu003`)."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", node_list)
    if match is None:
        return node_list
    return match[1] + (match[2] or "") + (match[3] or "")


def _whole(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise PlaceError(
                f"{name} is not set though other rank variables are; start ranks with --nproc, torchrun or srun"
            )
        return default
    try:
        return int(text)
    except ValueError:
        raise PlaceError(f"{name}={text!r} in the environment is no whole number") from None
