"""What every way to attend to other ranks' tokens has in common; `across` is what differs.

B sequences, T tokens of this rank, H query heads, G key/value heads, K head width.
"""

from typing import ClassVar

import torch
import torch.distributed as dist

from drumline.models.rope import Rope
from drumline.parallel.context.documents import Documents, describe
from drumline.parallel.context.position import rotate_local
from drumline.parallel.context.split import ContextSplit


class SharedAttend:
    """An `Attend` over a sequence that is spread over the ranks of a group.

    Args:
        split: this rank's place; its number in the group.
        group: of `split.degree` ranks.
    """

    across: ClassVar[type[torch.autograd.Function]]
    """Of rotated q_BTHK and k_BTGK, v_BTGK, split, group and documents: out_BTHK."""

    def __init__(self, split: ContextSplit, group: dist.ProcessGroup | None):
        self._split = split
        self._group = group

    def prepare(self, starts_BT: torch.Tensor, dtype: torch.dtype) -> Documents:
        """Documents of this rank's tokens; starts are positions in the whole row."""
        return describe(starts_BT, 2)

    def __call__(
        self, q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor, rope: Rope, mask: Documents | None
    ) -> torch.Tensor:
        """As `Attend`, for this rank's tokens; rope holds the tables of the whole sequence."""
        q, k = rotate_local(q_BTHK, rope, self._split), rotate_local(k_BTGK, rope, self._split)
        return self.across.apply(q, k, v_BTGK, self._split, self._group, mask)  # pyright: ignore[reportReturnType]
