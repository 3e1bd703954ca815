"""Strict mode: within it, an operator whose bits are not known to be invariant is refused before it runs."""

from collections.abc import Collection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drumline.numerics.invariant.registry import Entry, classify
from drumline.recipe.errors import DrumlineError

_TRANSPORT = ("c10d", "_c10d_functional", "fsdp", "profiler")
"""Sums across ranks are the layout's matter, in whose order no operator has a say."""


class NotInvariantError(DrumlineError):
    """An operator of class `unknown` was called in strict mode; the message names it and what would work."""


class strict(TorchDispatchMode):  # noqa: N801, it is used as `with strict():`
    """Refuses operators of class `unknown` on floating tensors, forward and backward.

    Operators on integers and booleans pass: they round nothing; so do collectives, whose order is the layout's matter,
    and what takes no tensor. What a custom autograd function calls is seen, too.

    Args:
        also: names such as `aten::pow` that the caller vouches for, say since they make a table of positions alone.

    Attributes:
        seen: how often each operator was called, by name.
    """

    def __init__(self, also: Collection[str] = ()):
        super().__init__()
        self.also = frozenset(also)
        self.seen: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator, or raises NotInvariantError."""
        kwargs = kwargs or {}
        name = func._schema.name
        self.seen[name] = self.seen.get(name, 0) + 1
        if name.partition("::")[0] in _TRANSPORT:
            return func(*args, **kwargs)
        entry = classify(name)
        if entry.kind == "unknown" and name not in self.also and _rounds(args, kwargs):
            raise NotInvariantError(_refusal(str(func), entry))
        is_sum = name.removesuffix("_") in ("aten::add", "aten::sub")
        if is_sum and kwargs.get("alpha", 1) != 1 and _rounds(args, kwargs):
            raise NotInvariantError(
                f"strict mode refuses {func} with alpha = {kwargs['alpha']}: it rounds bf16 elements at the end of a "
                "tensor otherwise than others\n  what works: multiply, then add"
            )
        return func(*args, **kwargs)


def _rounds(args: Any, kwargs: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return any(x.is_floating_point() or x.is_complex() for x in tensors)


def _refusal(name: str, entry: Entry) -> str:
    remedy = f"use {entry.instead}" if entry.instead else "operators that `drumline bench invariance --list` shows"
    return (
        f"strict mode refuses {name}: it is of class unknown ({entry.why}), so its bits may depend on batch, position, "
        f"chunking or threads\n  what works: {remedy}"
    )
