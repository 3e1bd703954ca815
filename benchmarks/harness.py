"""What every benchmark shares: alternating rounds, paired ratios, bars, the environment, and one JSON document.

A machine under load slows whoever runs at that moment. So contestants take turns within one run, the order turns
from round to round, and a ratio is the median of ratios within rounds, never a ratio of figures from different
times.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Bar:
    """One claim: the value must be at least the bar."""

    name: str
    value: float | None  # None: not measured here, which does not hold
    bar: float
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.value is not None and self.value >= self.bar


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--quick", action="store_true", help="fewer and shorter rounds: under 60 s once peers are installed"
    )
    options.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else")
    return options


def alternate(contestants: Mapping[str, Callable[[], T]], num_rounds: int) -> list[dict[str, T]]:
    """Runs each contestant once a round, starting with another one each time.

    Args:
        contestants: by name, what one turn does.
        num_rounds: how often.

    Returns:
        A round a row: what each contestant's turn returned.
    """
    names, rounds = list(contestants), []
    for index in range(num_rounds):
        first = index % len(names)
        rounds.append({name: contestants[name]() for name in names[first:] + names[:first]})
    return rounds


def paired_ratio(rounds: Sequence[Mapping[str, float]], over: str, under: str) -> float:
    """The median over rounds of rounds[over] / rounds[under]."""
    return statistics.median(row[over] / row[under] for row in rounds)


def median_of(rounds: Sequence[Mapping[str, float]], name: str) -> float:
    """The median over rounds of one contestant's figure."""
    return statistics.median(row[name] for row in rounds)


def environment() -> dict[str, object]:
    """What the figures depend on."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": load,
    }


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def finish(bars: Sequence[Bar], details: Mapping[str, object], table: str, as_json: bool) -> int:
    """Prints the outcome.

    Args:
        bars: the claims.
        details: raw rounds and whatever else belongs into the document.
        table: the figures for a reader.
        as_json: print the document alone.

    Returns:
        The exit code: 0 where all bars hold, else 1.
    """
    if as_json:
        rows = [{**asdict(bar), "holds": bar.holds} for bar in bars]
        print(json.dumps({"bars": rows, **details, "environment": environment()}, indent=1))
    else:
        print(table)
        for bar in bars:
            value = "not measured" if bar.value is None else f"{bar.value:.2f}"
            print(f"{'holds' if bar.holds else 'FAILS'}  {bar.name}: {value} (bar {bar.bar:g}) {bar.note}".rstrip())
    return 0 if all(bar.holds for bar in bars) else 1


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
