"""The environment of a run, as it stands in the run directory and in every commit: what one needs to know to run it
again.

Its digest covers what may decide bits (versions, processor, threads, variables, the code itself), and leaves out what
does not (host, command, how many ranks: these are the layout's). Two runs of one recipe and layout under environments
of one digest should have the same bits; where the digests differ, `differences` says by what.
"""

import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

import drumline
from drumline.comm import World
from drumline.comm.environment import read_variables
from drumline.numerics import kernels

_PACKAGES = (
    "torch",
    "numpy",
    "pydantic",
    "safetensors",
    "tokenizers",
    "xxhash",
    "triton",
    "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-nccl-cu12",
)
_PREFIXES = (
    "ATEN_",
    "CUBLAS",
    "CUDA_",
    "CUDNN_",
    "GLOO_",
    "GOMP_",
    "KMP_",
    "LD_PRELOAD",
    "MKL_",
    "NCCL_",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTHONHASHSEED",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
)
# Where a rank stands, which of a host's devices are its own, and where things lie.
_LEFT_OUT = (
    "TORCHELASTIC_",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE",
)
_NOT_BITS = frozenset(
    ("command", "digest", "drumline", "host", "num_cores", "platform", "ranks", "revision", "world_size")
)


def describe(world: World) -> dict[str, Any]:
    """Versions, machine, threads and variables of this rank, as JSON values, with their `digest`."""
    found = {
        "drumline": drumline.__version__,
        "revision": code_revision(),
        "source": source_digest(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": processor_name(),
        "num_cores": num_cores(),
        "num_threads": torch.get_num_threads(),
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "cuda": torch.version.cuda,
        "torch": _torch(world),
        "variables": read_variables(_PREFIXES, _LEFT_OUT),
        "world_size": world.size,
        "command": sys.argv[1:],
    }
    return found | {"digest": digest(found)}


def describe_all(world: World) -> dict[str, Any]:
    """The environment of rank 0 (of this rank, on others), with `ranks`: what differs on ranks that have another.

    All ranks must call it.
    """
    own = describe(world)
    digests = world.gather_objects(own["digest"])
    if len(set(digests)) == 1:
        return own
    all_of_them = world.gather_objects(own if own["digest"] != digests[0] or world.is_first else None)
    unlike = {str(rank): found for rank, found in enumerate(all_of_them) if found is not None and rank}
    ranks = {
        rank: {"host": found["host"]} | {key: value for key, _, value in differences(all_of_them[0], found)}
        for rank, found in unlike.items()
    }
    return own | {"ranks": ranks}


def digest(environment: Mapping[str, Any]) -> str:
    """A hash of what may decide bits, 16 hex digits.

    Args:
        environment: as `describe` makes it.

    Returns:
        The digest.
    """
    kept = {key: value for key, value in environment.items() if key not in _NOT_BITS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What may decide bits and differs between two environments.

    Args:
        before: as `describe` makes it, or as an older drumline made it: what it did not note is not held against it.
        after: likewise.

    Returns:
        (dotted key, value before, value after), by key; None where one side has no such entry.
    """
    known = before.keys() & after.keys() - _NOT_BITS
    one, other = (_flat({key: side[key] for key in known}) for side in (before, after))
    keys = sorted(one.keys() | other.keys())
    return [(key, one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": inner for name, inner in _flat(value).items()}
        else:
            found[key] = value
    return found


def _torch(world: World) -> dict[str, Any]:
    is_cuda = world.device.type == "cuda"
    return {
        "git": torch.version.git_version,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,
        "nccl": ".".join(map(str, nccl.version())) if is_cuda else None,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(world.device))) if is_cuda else None,
        "float32_matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "kernels": None if is_cuda else kernels.reason() or "drumline's",
    }


def source_digest() -> str:
    """A hash of the package's own files, 16 hex digits: the code that runs, committed or not, installed or not."""
    folder = Path(drumline.__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h", ".toml") and path.is_file():
            found.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """The processor's own name for itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def code_revision() -> str | None:
    """The git revision of the code, with `+` where files differ from it; None outside a checkout."""
    folder = Path(drumline.__file__).parent
    try:
        # An installed package may lie inside somebody else's repository, which says nothing about drumline.
        found = subprocess.run(
            ["git", "-C", folder, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, timeout=10
        )
        if found.returncode:
            return None
        head = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        dirty = subprocess.run(
            ["git", "-C", folder, "status", "--porcelain", "--untracked-files=no", "."], capture_output=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + "+" * bool(dirty.stdout) if head.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
