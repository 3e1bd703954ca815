"""The commands that the documentation shows, read from it, run, and written back with their real output.

A fenced block of `console` holds commands after `$ ` and their output; a block of `bash` holds commands only. A
comment on the line before the fence says how a block is treated:

    <!-- docs: slow -->         it takes more than some seconds: only `make test-slow` runs it
    <!-- docs: exit=2 -->       its last command ends with this code
    <!-- docs: exact -->        its output is compared to the letter; otherwise numbers may differ
    <!-- docs: lines=12 -->     only this many lines of output are shown, from the start and the end
    <!-- docs: skip=REASON -->  it cannot run here

The blocks of a document run from its top to its end in one folder, so that a later command finds what an earlier one
made. Commands other than `drumline`, and the few of the shell that prepare or look (`cat`, `ls`, `head`, ...), are
shown but not run.
"""

import difflib
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "handbook").glob("*.md"))]
TIMEOUT_S = 600
RUNNABLE = tuple("drumline python for cat ls head tail cp mv rm mkdir printf echo true exit truncate".split())  # noqa: SIM905

_FENCE = re.compile(
    r"(?:<!-- docs:(?P<options>[^\n]*?)-->\n)?```(?P<kind>console|bash)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)
_NUMBER = re.compile(r"0x[01]\.[0-9a-f]+p[+-]\d+|\d[\d,]*(\.\d+)?([eE][+-]?\d+)?")
_MACHINE = re.compile(r"(?<=attention: )[^,\n]+")
# The tensor with the worst ratio, in a table of `drumline verify` or `drumline numerics gate`: rounding has a say in
# it. The first that is wrong is told below the table.
_WORST = re.compile(r"\b\d/\w+/\S*(?= +(?:equal|DIFFER)\b|$)", re.MULTILINE)
_UNIT = re.compile(r"\b[KMGT]?i?B\b")
_SPACE = re.compile(r"[ \u2500-\u257f]+")
_CUT = "..."


class DocumentationError(AssertionError):
    """The documentation says what is not so."""


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        kind: `console` or `bash`.
        body: the text between the fences.
        start: where the body begins in the document.
        line: its number in the document, from 1.
        options: from the comment before it.
    """

    kind: str
    body: str
    start: int
    line: int
    options: dict[str, str] = field(default_factory=dict)

    @property
    def is_slow(self) -> bool:
        return "slow" in self.options

    @property
    def commands(self) -> list[str]:
        """What is typed. In a console a command goes on in lines that start with `> `, else after a backslash."""
        if self.kind == "console":
            typed = re.findall(r"^\$ (.*(?:\n> .*)*)", self.body, re.MULTILINE)
            return [command.replace("\n> ", "\n") for command in typed]
        lines = self.body.replace("\\\n", "\\\0").splitlines()
        return [line.replace("\0", "\n") for line in lines if line.strip() and not line.startswith("#")]

    @property
    def is_run(self) -> bool:
        return "skip" not in self.options and all(command.split()[0] in RUNNABLE for command in self.commands)


def read_blocks(text: str) -> list[Block]:
    """The blocks of a document, in order."""
    return [
        Block(
            match["kind"],
            match["body"],
            match.start("body"),
            text.count("\n", 0, match.start("body")) + 1,
            _options(match["options"] or ""),
        )
        for match in _FENCE.finditer(text)
    ]


def _options(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in (item.strip() for item in text.split(",")) if part]
    unknown = {key for key, _, _ in pairs} - {"slow", "exit", "exact", "lines", "skip"}
    if unknown:
        raise DocumentationError(f"unknown option of a block: {', '.join(sorted(unknown))}")
    return {key: value for key, _, value in pairs}


def run_block(block: Block, folder: Path) -> str:
    """Runs a block's commands; gives the body that they would make.

    Raises:
        DocumentationError: the last command ended with another code than the block says, or an earlier one failed.
    """
    written = []
    for index, command in enumerate(block.commands):
        expected = int(block.options.get("exit", 0)) if index == len(block.commands) - 1 else 0
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=_environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode != expected:
            raise DocumentationError(
                f"line {block.line}: `{command}` ended with {done.returncode}, not {expected}:\n{done.stdout}"
            )
        output = [line.rstrip() for line in done.stdout.replace(f"{folder}/", "").splitlines()]
        typed = command.replace("\n", "\n> ")
        written.append("\n".join([f"$ {typed}", *_cut(output, int(block.options.get("lines", 0)))]).rstrip() + "\n")
    return "".join(written) if block.kind == "console" else block.body


def check_block(block: Block, made: str) -> None:
    """Compares what a block shows with what its commands wrote.

    Where the block is not exact, numbers may differ, what depends on the machine, and the order of lines: a commit that
    is made in the background is told when it is done.

    Raises:
        DocumentationError: they differ beyond that.
    """
    is_exact = "exact" in block.options
    shown, now = ((text if is_exact else _same_everywhere(text)).splitlines() for text in (block.body, made))
    if shown != now if is_exact else sorted(shown) != sorted(now):
        lines = difflib.unified_diff(shown, now, "shown", "now", lineterm="")
        message = f"line {block.line}: the output is another now; `make docs` writes it anew"
        raise DocumentationError("\n".join([message, *lines]))


def _same_everywhere(text: str) -> str:
    for pattern, replacement in ((_MACHINE, "*"), (_WORST, "*"), (_NUMBER, "0"), (_UNIT, "B"), (_SPACE, " ")):
        text = pattern.sub(replacement, text)
    return text


def _cut(lines: list[str], limit: int) -> list[str]:
    if not limit or len(lines) <= limit:
        return lines
    head = (limit + 1) // 2
    return [*lines[:head], _CUT, *lines[len(lines) - (limit - head) :]]


def _environment(folder: Path) -> dict[str, str]:
    shims = folder / ".bin"
    shims.mkdir(exist_ok=True)
    for name, arguments in (("drumline", "-m drumline "), ("python", "")):
        shim = shims / name
        if not shim.exists():
            shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
            shim.chmod(0o755)
    paths = {"PATH": f"{shims}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    looks = {"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"}
    return {**os.environ, **paths, **looks, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
