"""Making a commit of weights that come from elsewhere: step 0, no optimizer states, ready to be trained from.

It is written as if by several ranks, one after the other, so that memory holds one shard at a time.
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from drumline.checkpoint.errors import CommitError
from drumline.checkpoint.folder import Folder
from drumline.checkpoint.index import ENVIRONMENT, RECIPE, STATE
from drumline.checkpoint.piece import whole
from drumline.checkpoint.snapshot import Snapshots
from drumline.checkpoint.writing import Save, carry_out, write_share

SHARD_BYTES = 2 << 30
_TIMEOUT_S = 600.0


def import_weights(
    directory: Path,
    sizes: Mapping[str, int],
    read: Callable[[str], torch.Tensor],
    *,
    recipe: Mapping[str, Any],
    environment: Mapping[str, Any],
    state: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Makes the commit of step 0 in a run that has none yet.

    Args:
        directory: the folder of commits; it is made if need be.
        sizes: bytes of each tensor, by logical name (`model.norm.weight`).
        read: gives a tensor by its logical name, in the dtype in which the run keeps it.
        recipe: what is known of the recipe, as JSON values.
        environment: where it was imported.
        state: what the run finds as state.
        shard_bytes: a shard is closed before it would pass this.

    Returns:
        The folder of the commit.

    Raises:
        CommitError: the run has commits already.
        SaveError: it could not be written.
    """
    folder = Folder(directory)
    if present := folder.found():
        raise CommitError(f"{directory} holds commits already ({present[-1].path.name}); import into a run of its own")
    groups = _groups(sizes, shard_bytes)
    documents = {
        name: json.dumps(dict(values), indent=1).encode() + b"\n"
        for name, values in ((STATE, state), (RECIPE, recipe), (ENVIRONMENT, environment))
    }
    save = Save(
        folder=folder,
        step=0,
        save=f"{uuid.uuid4().hex[:12]}-0001",
        rank=0,
        world_size=len(groups),
        keep=1,
        documents=documents,
        timeout_s=_TIMEOUT_S,
    )
    snapshots = Snapshots(rank=0)
    try:
        # Rank 0 goes last: it finds all the other parts there, and makes the commit.
        for rank in reversed(range(len(groups))):
            snapshot = snapshots.take([whole(name, read(name)) for name in groups[rank]])
            (carry_out if rank == 0 else write_share)(replace(save, rank=rank), snapshot)
    except BaseException:
        folder.remove_quietly(save.unfinished)
        raise
    return save.target


def _groups(sizes: Mapping[str, int], shard_bytes: int) -> Sequence[list[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name, num_bytes in sizes.items():
        if groups[-1] and filled + num_bytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += num_bytes
    return groups
