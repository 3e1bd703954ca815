"""The environment of a run, as it stands in the run directory and in every commit: what one needs to know to run it
again.
"""

import os
import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import drumline
from drumline.comm import World

_PACKAGES = ("torch", "numpy", "pydantic", "safetensors", "tokenizers", "xxhash", "triton")


def describe(world: World) -> dict[str, Any]:
    """Versions, machine and threads of this rank, as JSON values."""
    return {
        "drumline": drumline.__version__,
        "revision": code_revision(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "platform": platform.platform(),
        "processor": processor_name(),
        "num_cores": num_cores(),
        "num_threads": torch.get_num_threads(),
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "cuda": torch.version.cuda,
        "world_size": world.size,
        "command": sys.argv[1:],
    }


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
