"""What takes the parts of logical tensors that a rank has."""

from typing import Protocol

import torch


class Sink(Protocol):
    """Takes what a rank has of a logical tensor."""

    def add(
        self,
        key: str,
        shape: tuple[int, ...],
        tensor: torch.Tensor,
        *,
        offsets: tuple[int, ...] = (),
        rows_N: torch.Tensor | None = None,
        microbatch: int = -1,
    ) -> None:
        """Takes a part, which may be overwritten once this returns; as `Part`."""
        ...
