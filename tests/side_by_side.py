"""Runs the tests in several pytest processes at once, for most tests keep one core busy.

    python -m tests.side_by_side -m "not slow"      # what follows goes to every pytest

Every process collects all tests; the next file of tests is taken by whoever is free, so that none waits long for
another at the end. They are plain processes: a worker with threads of its own could not fork ranks. Ends with one line
like pytest's own for all of them, and with 0 where all of them did.
"""

import collections
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

FOLDER = "--take-files-from"
POLL_S = 0.2
STOP = "stop"
# Those that take minutes come first: one that began last would go on alone.
LONGEST = (
    "tests/docs/test_documents.py",
    "tests/verify/test_exact.py",
    "tests/train/test_exact_pieces.py",
    "tests/train/test_experts.py",
    "tests/verify/test_layouts.py",
    "tests/train/test_exact_layouts.py",
    "tests/train/test_layouts.py",
    "tests/train/test_deepseek.py",
    "tests/train/test_expert_layouts.py",
    "tests/parallel/pipeline/test_pipeline.py",
    "tests/train/test_exact_elastic.py",
    "tests/parallel/tensor/test_tensor_parity.py",
)


class Taken:
    """The files that processes have taken, as files of a folder: its name says which, its text what became of it."""

    def __init__(self, folder: Path):
        self._folder = folder

    def take(self, path: str) -> bool:
        """Whether the file of tests is the caller's from now on; false where another has it or all are to stop."""
        if (self._folder / STOP).exists():
            return False
        try:
            self._at(path).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def stop(self) -> None:
        """Nobody takes another file."""
        (self._folder / STOP).touch()

    def finish(self, path: str, says: str) -> None:
        """Says what became of a file of tests."""
        written = self._folder / f".{os.getpid()}"
        written.write_text(says, encoding="utf-8")
        written.replace(self._at(path))

    def finished(self) -> dict[str, str]:
        """What became of every file that is done."""
        found = [path for path in self._folder.iterdir() if not path.name.startswith(".") and path.name != STOP]
        texts = {path.name.replace("%", "/"): path.read_text(encoding="utf-8") for path in sorted(found)}
        return {path: text for path, text in texts.items() if text}

    def _at(self, path: str) -> Path:
        return self._folder / path.replace("/", "%")


class TakesFiles:
    """A pytest plugin: runs the tests of the files that this process takes, file by file."""

    def __init__(self, taken: Taken):
        self._taken = taken
        self._counts: collections.Counter[str] = collections.Counter()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In pytest's stead; it would run every test."""
        if session.config.option.collectonly:
            return True
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        for path, items in by_file(session.items):
            if not self._taken.take(path):
                continue
            self._counts.clear()
            began, computed = time.monotonic(), cpu_s()
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if reason := session.shouldfail or session.shouldstop:
                    self._taken.stop()
                    raise session.Failed(reason) if session.shouldfail else session.Interrupted(reason)
            seconds = f"{time.monotonic() - began:.1f} s, {cpu_s() - computed:.1f} s of CPU"
            self._taken.finish(path, f"{summary(self._counts)} in {seconds}")
        return True

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Counts, and shows no dot: a line a file says more where several processes write."""
        if report.passed and report.when != "call":
            return None
        category = report.outcome if report.when == "call" or report.skipped else "error"
        if getattr(report, "wasxfail", None) is not None:
            return None
        self._counts[category] += 1
        return category, "", category.upper()


def cpu_s() -> float:
    """CPU time of this process and of those that it started and saw end, seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def by_file(items: Iterable[pytest.Item]) -> Iterator[tuple[str, list[pytest.Item]]]:
    """The tests of each file, the longest files first, else as pytest found them."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.split("::")[0], []).append(item)
    first = [path for path in LONGEST if path in files]
    for path in [*first, *(path for path in files if path not in LONGEST)]:
        yield path, files[path]


def summary(counts: collections.Counter[str]) -> str:
    """`2 failed, 3 passed`, in pytest's order."""
    order = (
        "failed",
        "passed",
        "skipped",
        "deselected",
        "xfailed",
        "xpassed",
        "warning",
        "warnings",
        "error",
        "errors",
    )
    told = sorted(counts, key=lambda name: order.index(name) if name in order else len(order))
    return ", ".join(f"{counts[name]} {name}" for name in told if counts[name]) or "no tests ran"


def read_summary(line: str) -> collections.Counter[str] | None:
    """The counts of the line that a pytest ends with; None where it is no such line."""
    if not re.search(r" in [\d.]+s( \([\d:]+\))?$", line):
        return None
    found = re.findall(r"(\d+) ([a-z]+)", line.rsplit(" in ", 1)[0])
    return collections.Counter({name: int(number) for number, name in found})


def pytest_addoption(parser: pytest.Parser) -> None:
    """The folder in which processes say what they take."""
    parser.addoption(FOLDER, type=Path, help="run the files of tests that no other process took, as this folder tells")


def pytest_configure(config: pytest.Config) -> None:
    """Takes files where the option says so."""
    if folder := config.getoption(FOLDER):
        config.pluginmanager.register(TakesFiles(Taken(folder)))


def run(arguments: Sequence[str], num_processes: int, say=print) -> int:
    """Runs pytest processes until all have ended, and says what they found.

    Returns:
        0 where all tests passed, else the first exit status that is not 0.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        outputs = [Path(name) / f"output-{number}" for number in range(num_processes)]
        folder = Path(name) / "taken"
        folder.mkdir()
        processes = []
        for output in outputs:
            command = [sys.executable, "-m", "pytest", "-p", __spec__.name, f"{FOLDER}={folder}", *arguments]
            with output.open("w") as file:
                processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
        statuses = _wait(processes, Taken(folder), say)
        counts: collections.Counter[str] = collections.Counter()
        for number, (output, status) in enumerate(zip(outputs, statuses, strict=True), start=1):
            lines = output.read_text(errors="replace").strip().splitlines()
            found = read_summary(lines[-1]) if lines else None
            # What every process left out alike is no sum.
            counts += collections.Counter({key: n for key, n in (found or {}).items() if key != "deselected"})
            text = "\n".join(lines if found is None else lines[:-1]).strip()
            if text or status < 0:
                ended = f", ended by {signal.Signals(-status).name}" if status < 0 else ""
                say(f"\n--- pytest process {number} of {num_processes}{ended}\n{text}\n")
        failed = [status for status in statuses if status]
        counts["error"] += sum(status < 0 for status in statuses)
    seconds = time.monotonic() - began
    minutes = f" ({int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02})" if seconds >= 60 else ""
    say(f"{summary(counts)} in {seconds:.2f}s{minutes}")
    return abs(failed[0]) if failed else 0


def _wait(processes: Sequence[subprocess.Popen], taken: Taken, say) -> list[int]:
    told: set[str] = set()
    is_over = False
    while not is_over:
        try:
            time.sleep(POLL_S)
            is_over = all(process.poll() is not None for process in processes)
            for path, text in taken.finished().items():
                if path not in told:
                    say(f"{path}: {text}")
                    told.add(path)
        except KeyboardInterrupt:  # Ctrl-C reached them, too: they end their tests and tell
            taken.stop()
    return [process.returncode for process in processes]


def main() -> int:
    """One process a core, but no more than can fork their ranks without crowding one another out."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return run(sys.argv[1:], min(2, cores) if cores < 8 else cores // 4, lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main())
