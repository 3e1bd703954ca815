"""Build and load this folder's C++ sources, once a user and machine.

A source becomes a shared object with a plain C interface, called by ctypes: seconds to build, no torch headers, any
torch version. The cache is keyed by sources, compiler, flags, OpenMP runtime and CPU; a lock makes one of several
ranks build while the others wait, and a file appears under its final name only after its check passed.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from drumline.numerics import openmp
from drumline.recipe.errors import DrumlineError

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fPIC")
BUILD_TIMEOUT_S = 300


class KernelError(DrumlineError):
    """The kernels cannot run here; the message says why."""


def load(name: str, check: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL:
    """Load `name`.cpp's library, building and checking it on first use on this machine.

    Args:
        name: a source of this folder, without its suffix.
        check: called with a freshly built library; raises if its results are wrong.

    Returns:
        The library. Its functions release the GIL while they run.

    Raises:
        KernelError: no compiler, a failed build, or a failed check.
    """
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        raise KernelError("no C++ compiler on PATH (looked for g++, c++, clang++)")
    command = [compiler, *FLAGS, _target_flag()]
    runtime = openmp_runtime()
    path = _cache_folder() / f"{name}-{_digest(name, command, runtime)}.so"
    if path.exists():
        return _open(path)
    with _locked(path.with_suffix(".lock")):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{name}-") as folder:
                built = Path(folder) / path.name
                _compile(command, HERE / f"{name}.cpp", built, runtime)
                with (
                    torch.inference_mode(False),
                    torch.enable_grad(),
                ):  # a first call may be inside an operator's forward
                    check(_open(built))
                built.replace(path)
    return _open(path)


def openmp_runtime() -> Path | None:
    """The OpenMP runtime that torch loaded into this process; a second one would be a second pool of threads."""
    return next(iter(openmp.runtimes()), None)


def _target_flag() -> str:
    return "-march=native" if platform.machine().lower() in ("x86_64", "amd64", "i686") else "-mcpu=native"


def _compile(command: list[str], source: Path, target: Path, runtime: Path | None) -> None:
    """Compile and link apart, so that the runtime is linked by its path and not by -fopenmp's own choice."""
    compiled = target.with_suffix(".o")
    steps = [
        [*command, *(["-fopenmp"] if runtime else []), "-c", str(source), "-o", str(compiled)],
        [command[0], "-shared", str(compiled), *([str(runtime)] if runtime else []), "-o", str(target)],
    ]
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelError(f"{command[0]} did not finish: {error}") from error
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:300])
            raise KernelError(f"{command[0]} could not build {source.name}: {first}")


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"cannot load {path}: {error}") from error


def _digest(name: str, command: list[str], runtime: Path | None) -> str:
    """Changes whenever the built file could."""
    digest = hashlib.sha256()
    for source in (HERE / f"{name}.cpp", *sorted(HERE.glob("*.h"))):
        digest.update(source.read_bytes())
    compiler = Path(command[0]).resolve()
    stat = compiler.stat()
    parts = [
        *command,
        str(compiler),
        str(stat.st_size),
        str(stat.st_mtime_ns),
        str(runtime),
        platform.machine(),
        _cpu(),
    ]
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:20]


@functools.cache
def _cpu() -> str:
    """The lines of /proc/cpuinfo that decide what -march=native means."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        wanted = ("flags", "Features", "model", "cpu family", "CPU implementer", "CPU part", "vendor_id")
        return "\n".join(line for line in text.splitlines() if line.split(":")[0].strip() in wanted)
    return platform.processor()


def _cache_folder() -> Path:
    """The user's cache folder, else a private one among the temporary files."""
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    private = Path(tempfile.gettempdir()) / f"drumline-kernels-{owner}"
    for folder in (Path.home() / ".cache" / "drumline" / "kernels", private):
        with contextlib.suppress(OSError, RuntimeError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # A shared /tmp: never load what somebody else could have put there.
            if os.access(folder, os.W_OK) and folder.stat().st_uid == owner:
                return folder
    raise KernelError("no writable cache folder for the built kernels")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock; a process that dies lets go of it."""
    try:
        import fcntl
    except ImportError as error:
        raise KernelError("the kernels need a POSIX system") from error
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
