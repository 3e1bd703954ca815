"""The OpenMP runtimes of this process, and the threads that they keep between parallel regions.

A runtime's threads wait for work in a pool that a fork copies without them: the child's first parallel region then
waits for threads that are not there. A process that lets its pool go first can be forked whatever it computed; the next
region makes a new one.
"""

import contextlib
import ctypes
import re
from pathlib import Path

import torch

SOFT = 1
"""omp_pause_soft: threads end and settings stay."""


def runtimes() -> list[Path]:
    """The runtimes loaded into this process, torch's own among them; those beside torch where /proc does not say."""
    pattern = re.compile(r"/[^\s]*lib(?:gomp|iomp5|omp)[^/\s]*\.so[^/\s]*$")
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        if found := dict.fromkeys(match.group() for line in lines if (match := pattern.search(line))):
            return [Path(path) for path in found]
    folder = Path(torch.__file__).parent / "lib"
    return sorted([*folder.glob("libgomp*"), *folder.glob("libiomp5*"), *folder.glob("libomp*")])


def end_idle_threads() -> None:
    """Ends the threads that OpenMP keeps for this thread of the process; to be called right before a fork.

    Runtimes older than OpenMP 5.0 have no call for it (GCC 8 and older): they keep their threads.
    Source: OpenMP 5.0, section 3.2.44, omp_pause_resource_all.
    """
    for path in runtimes():
        with contextlib.suppress(OSError):
            runtime = ctypes.CDLL(str(path))
            if hasattr(runtime, "omp_pause_resource_all"):
                runtime.omp_pause_resource_all(SOFT)
