"""Which files a source means: a file, a folder and all below it, or a pattern; always in the same order."""

import glob
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drumline.data import manifest
from drumline.recipe.errors import DrumlineError

Kind = Literal["text", "jsonl", "parquet"]

JSONL_SUFFIXES = (".jsonl", ".ndjson")
SNIFF_BYTES = 1 << 20
PARQUET_SUFFIXES = (".parquet", ".pq")
UNREADABLE_SUFFIXES = {
    ".zst": "zstd -d",
    ".xz": "xz -d",
    ".bz2": "bzip2 -d",
    ".zip": "unzip",
    ".tar": "tar xf",
    ".tgz": "tar xf",
}


@dataclass(frozen=True)
class File:
    """A file to read.

    Attributes:
        path: where it is.
        kind: how it is read.
        named: the user named it; one that was found by a folder or a pattern may be left out when it is not text.
        num_bytes: its size.
    """

    path: Path
    kind: Kind
    named: bool
    num_bytes: int


def find_files(spec: str) -> list[File]:
    """Lists what a source means, sorted by path.

    Hidden files and folders, and prepared folders, are left out below a folder.

    Args:
        spec: the path of a file or folder, or a pattern with * ? [ ] or **.

    Returns:
        The files, at least one.

    Raises:
        DrumlineError: there is no such file, or a folder cannot be read.
    """
    path = Path(spec).expanduser()
    mode = _mode(path)
    if stat.S_ISDIR(mode):
        if _is_prepared(path):
            raise DrumlineError(f"{path} is a prepared data folder already: train on it with data.sources")
        found = list(_below(path))
    elif mode:
        return [_file(path, named=True)]
    elif glob.has_magic(spec):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        found = [match for match in matches if match.is_file()]
    else:
        raise DrumlineError(f"no source {spec!r}: give a file, a folder, a pattern, `hf:NAME` or `stdlib`")
    if not found:
        raise DrumlineError(f"no files in {spec}" if mode else f"no file matches {spec!r}")
    return [_file(match, named=False) for match in found]


def _mode(path: Path) -> int:
    """Returns the type of a file as `stat` has it; 0 where there is none."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise DrumlineError(f"cannot read {path}: {error.strerror}") from error


def _file(path: Path, *, named: bool) -> File:
    suffix = path.suffix.lower() if path.suffix.lower() != ".gz" else Path(path.stem).suffix.lower()
    if named and path.suffix.lower() in UNREADABLE_SUFFIXES:
        raise DrumlineError(f"{path} is packed: unpack it first, `{UNREADABLE_SUFFIXES[path.suffix.lower()]} {path}`")
    try:
        kind: Kind = "parquet" if suffix in PARQUET_SUFFIXES else "text"
        if suffix in JSONL_SUFFIXES or (suffix == ".json" and (named or _is_json_lines(path))):
            kind = "jsonl"
        return File(path, kind, named, path.stat().st_size)
    except OSError as error:
        raise DrumlineError(f"cannot read {path}: {error.strerror}") from error


def _below(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DrumlineError(f"cannot read the folder {error.filename}: {error.strerror}") from error

    paths = []
    for folder, names, files in os.walk(root, onerror=refuse):
        here = Path(folder)
        names[:] = [name for name in names if not name.startswith(".") and not _is_prepared(here / name)]
        paths += [here / name for name in files if not name.startswith(".") and (here / name).is_file()]
    return iter(sorted(paths, key=lambda path: path.relative_to(root).as_posix()))


def _is_json_lines(path: Path) -> bool:
    """Tells JSON lines from the settings of some program, which are text like any other."""
    with path.open("rb") as file:
        try:
            return isinstance(json.loads(file.readline(SNIFF_BYTES)), dict)
        except (ValueError, RecursionError):
            return False


def _is_prepared(folder: Path) -> bool:
    try:
        with (folder / manifest.NAME).open("rb") as file:
            return f'"{manifest.FORMAT}"'.encode() in file.read(256)
    except OSError:
        return False
