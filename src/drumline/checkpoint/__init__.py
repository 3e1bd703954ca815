"""What a commit is: made so that it never half exists, and read back under any layout.

In: pieces (this rank's parts of logical tensors), a state and a recipe as JSON. Out: commits on disk, and pieces filled
    from them.
Knows nothing of modules, meshes or optimizers, and never reads a pickle.
"""

from drumline.checkpoint.commit import Commit, open_commit
from drumline.checkpoint.errors import CommitError, DamagedCommitError, NotACommitError, SaveError
from drumline.checkpoint.folder import newest_commit
from drumline.checkpoint.handle import CommitHandle
from drumline.checkpoint.piece import Piece, whole
from drumline.checkpoint.saver import Saver

__all__ = [
    "Commit",
    "CommitError",
    "CommitHandle",
    "DamagedCommitError",
    "NotACommitError",
    "Piece",
    "SaveError",
    "Saver",
    "newest_commit",
    "open_commit",
    "whole",
]
