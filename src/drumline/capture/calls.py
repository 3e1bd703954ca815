"""Which call of a module this is: a name has the number of the call in its micro-batch, from the second on."""

import torch
from torch import nn


class Calls:
    """Counts the calls of modules, apart by whatever is given with a name."""

    def __init__(self) -> None:
        self._calls: dict[tuple, int] = {}

    def clear(self) -> None:
        """A step begins or has ended."""
        self._calls.clear()

    def numbered(self, module: nn.Module, name: str, *apart: object) -> str:
        """Counts a call.

        Args:
            module: that is called. Where `num_calls_before` is there, so many were on other ranks.
            name: logical name of it.
            *apart: the micro-batch, and what else is counted by itself.

        Returns:
            The name; `name#1` for the second call, and so on.
        """
        place = name, *apart
        count = self._calls[place] = max(self._calls.get(place, -1) + 1, getattr(module, "num_calls_before", 0))
        return f"{name}#{count}" if count else name


def is_recomputing() -> bool:
    """Whether a backward runs: a forward in it is one that activation checkpointing runs again."""
    return torch._C._current_graph_task_id() != -1
