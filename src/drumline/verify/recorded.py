"""What a run under verification leaves behind: parts of logical tensors, under names that no layout changes.

    2/gradient/layers.0.mlp.up_proj.weight          step / kind / logical name

Every rank writes its parts into a file; joined, they must agree bit for bit where they overlap and leave nothing out.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INIT, FORWARD, LOSS, ROUTING, GRADIENT, NORM, WEIGHT = (
    "init",
    "forward",
    "loss",
    "routing",
    "gradient",
    "norm",
    "weight",
)
KINDS = (INIT, FORWARD, LOSS, ROUTING, GRADIENT, NORM, WEIGHT)
"""In the order in which a step makes them."""


def key(step: int, kind: str, name: str = "") -> str:
    """`step/kind/name`; steps count from 1, what was there before is step 0."""
    return f"{step}/{kind}/{name}"


def split_key(text: str) -> tuple[int, str, str]:
    """Step, kind and name of a key."""
    step, kind, name = text.split("/", 2)
    return int(step), kind, name


@dataclass(frozen=True)
class Part:
    """A part of a logical tensor.

    Attributes:
        key: of the tensor.
        shape: of the whole tensor.
        tensor: the part.
        offsets: where it starts, for a box.
        rows_N: which rows of the first dim it has, int64, where it is no box; then its other dims are whole.
    """

    key: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    offsets: tuple[int, ...] = ()
    rows_N: torch.Tensor | None = None

    @property
    def place(self) -> tuple:
        """An index into the whole tensor that gives the part."""
        if self.rows_N is not None:
            return (self.rows_N,)
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.tensor.shape, strict=True))


def scalar(name: str, value: float) -> Part:
    """A number that every rank has."""
    return Part(name, (), torch.tensor(value, dtype=torch.float64))


def write(parts: Sequence[Part], path: Path) -> None:
    """Writes a rank's parts into a new file."""
    tensors = {str(i): part.tensor.contiguous() for i, part in enumerate(parts)}
    tensors |= {f"{i}#rows": part.rows_N for i, part in enumerate(parts) if part.rows_N is not None}
    listed = [{"key": part.key, "shape": part.shape, "offsets": part.offsets} for part in parts]
    save_file(tensors, path, metadata={"parts": json.dumps(listed)})


def read(path: Path) -> list[Part]:
    """Reads what `write` wrote."""
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        return [
            Part(
                entry["key"],
                tuple(entry["shape"]),
                file.get_tensor(str(i)),
                tuple(entry["offsets"]),
                file.get_tensor(f"{i}#rows") if f"{i}#rows" in names else None,
            )
            for i, entry in enumerate(json.loads(file.metadata()["parts"]))
        ]


@dataclass(frozen=True)
class Joined:
    """Whole tensors.

    Attributes:
        tensors: by key.
        unequal: keys of tensors of which two ranks hold the same elements with other bits, in the order in which the
            first rank has them.
        missing: keys of tensors of which no rank holds some elements.
    """

    tensors: Mapping[str, torch.Tensor]
    unequal: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def join(ranks: Iterable[Sequence[Part]]) -> Joined:
    """Joins the parts of all ranks.

    Args:
        ranks: each rank's parts.

    Returns:
        The tensors, and what does not fit together.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    unequal: dict[str, None] = {}
    for parts in ranks:
        for part in parts:
            if part.key not in tensors:
                tensors[part.key] = torch.zeros(part.shape, dtype=part.tensor.dtype)
                seen[part.key] = torch.zeros(part.shape, dtype=torch.bool)
            whole, is_seen, place = tensors[part.key], seen[part.key], part.place
            both = is_seen[place]
            if not same_bits(whole[place][both], part.tensor[both]):
                unequal[part.key] = None
            whole[place] = torch.where(both, whole[place], part.tensor)
            is_seen[place] = True
    missing = tuple(name for name, is_seen in seen.items() if not bool(is_seen.all()))
    return Joined(tensors, tuple(unequal), missing)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; zeros of both signs differ, equal not-a-numbers do not."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integer = _INTEGERS[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
