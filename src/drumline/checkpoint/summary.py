"""What people ask about commits: which one is meant, and what is in it, as plain values."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drumline.checkpoint.commit import Commit, open_commit
from drumline.checkpoint.errors import CommitError
from drumline.checkpoint.folder import COMMITS, Folder, Found, commits_directory
from drumline.checkpoint.index import MARKER, step_of, unfinished_of
from drumline.recipe.layout import Layout


def is_commit(path: Path) -> bool:
    """Whether a path means a commit itself, whole or not, and not a run."""
    return (path / MARKER).exists() or step_of(path.resolve().name) is not None or path.is_file()


def run_of(commit: Path) -> Path:
    """The run directory of a commit; the folder that it lies in, where that is in no run."""
    folder = (commit if len(commit.parts) > 2 else commit.absolute()).parent
    return folder.parent if folder.name == COMMITS else folder


def find_commit(path: Path, step: int | None = None) -> Commit:
    """The commit that a path means.

    Args:
        path: a commit, or a run: its newest commit, which must be whole.
        step: which step of the run.

    Returns:
        The commit.

    Raises:
        CommitError: there is none, or it is not whole.
    """
    if is_commit(path):
        commit = open_commit(path)
        if step not in (None, commit.step):
            raise CommitError(f"{path} is step {commit.step}, not {step}")
        return commit
    folder = Folder(commits_directory(path))
    steps = folder.steps()
    if not steps:
        raise CommitError(f"there is no commit in {folder.path}")
    if step is not None and step not in steps:
        raise CommitError(f"{folder.path} has no step {step}; it has {_listed(steps)}")
    return open_commit(folder.commit(steps[-1] if step is None else step))


def choose_pair(a: Path, b: Path, step: int | None) -> tuple[Commit, Commit]:
    """The two commits that are to be compared.

    Args:
        a: a commit or a run.
        b: a commit or a run. A run stands for its commit of the other's step, or for the newest step that both runs
            have.
        step: which step of the runs.

    Returns:
        Both.

    Raises:
        CommitError: there are no two such commits.
    """
    if step is None and not (is_commit(a) and is_commit(b)):
        if is_commit(a) or is_commit(b):
            step = (find_commit(a) if is_commit(a) else find_commit(b)).step
        else:
            steps, others = Folder(commits_directory(a)).steps(), Folder(commits_directory(b)).steps()
            common = sorted({*steps} & {*others})
            if not common:
                raise CommitError(
                    f"no step is in both runs: {a} has {_listed(steps)}, {b} has {_listed(others)}; give two commits"
                )
            step = common[-1]
        return (
            find_commit(a, None if is_commit(a) else step),
            find_commit(b, None if is_commit(b) else step),
        )
    return find_commit(a, step), find_commit(b, step)


def num_bytes_under(commit: Commit, prefix: str) -> int:
    """Bytes of the logical tensors whose names start so."""
    return sum(tensor.num_bytes for name, tensor in commit.index.tensors.items() if name.startswith(prefix))


def describe_found(found: Found) -> dict[str, Any]:
    """A row about a folder that bears a commit's name."""
    commit = found.commit
    return {
        "step": found.step,
        "folder": found.path.name,
        "num_bytes": commit.num_bytes if commit else None,
        "num_tensors": len(commit.index.tensors) if commit else None,
        "layout": layout_of(commit) if commit else None,
        "created": commit.manifest.created if commit else None,
        "status": "whole" if commit else _first_reason(found.problem),
    }


def describe_unfinished(directory: Path) -> list[dict[str, Any]]:
    """A row about each save that is under way or was killed."""
    rows = []
    for path in sorted(directory.iterdir()):
        kind_and_step = unfinished_of(path.name)
        if kind_and_step is not None:
            status = {"tmp": "being written, or killed", "old": "replaced", "trash": "pruned"}[kind_and_step[0]]
            rows.append(
                {
                    "step": kind_and_step[1],
                    "folder": path.name,
                    "num_bytes": None,
                    "num_tensors": None,
                    "layout": None,
                    "created": None,
                    "status": f"no commit: {status}",
                }
            )
    return rows


def describe_commit(commit: Commit) -> dict[str, Any]:
    """What a commit holds."""
    groups: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, tensor in commit.index.tensors.items():
        group = groups[name.partition(".")[0]]
        group[0] += 1
        group[1] += tensor.num_elements
        group[2] += tensor.num_bytes
    return {
        "path": str(commit.path),
        "step": commit.step,
        "created": commit.manifest.created,
        "num_bytes": commit.num_bytes,
        "num_files": len(commit.manifest.files) + 2,
        "world_size": commit.index.world_size,
        "layout": layout_of(commit),
        "recipe_name": commit.recipe.get("name"),
        "state": commit.state,
        "environment": commit.environment,
        "groups": [
            {"group": name, "num_tensors": counts[0], "num_elements": counts[1], "num_bytes": counts[2]}
            for name, counts in sorted(groups.items())
        ],
    }


def describe_tensors(commit: Commit) -> list[dict[str, Any]]:
    """A row about each logical tensor."""
    return [
        {
            "name": name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "num_bytes": tensor.num_bytes,
            "num_pieces": len(tensor.pieces),
            "ranks": sorted({piece.rank for piece in tensor.pieces}),
        }
        for name, tensor in sorted(commit.index.tensors.items())
    ]


def layout_of(commit: Commit) -> str | None:
    """The layout that wrote a commit, as a string; None where its recipe does not say."""
    if "layout" not in commit.recipe:
        return None
    try:
        return str(Layout.model_validate(commit.recipe["layout"]))
    except ValidationError:  # a newer or older drumline's
        return str(commit.recipe["layout"])


def _first_reason(problem: str) -> str:
    lines = problem.splitlines()
    return lines[1].strip() if len(lines) > 1 else lines[0]


def _listed(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-8:]))
    return ("..., " if len(steps) > 8 else "") + shown if steps else "none"
