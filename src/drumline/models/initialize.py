"""Initial weights, the same bits under every sharding.

Element i (row-major, of the whole logical tensor) of parameter `name` is element i of the random stream `init/<name>`,
so a rank fills its piece alone. Weights are normal(0, init_std); what writes into the residual stream (o_proj,
down_proj) is scaled by 1 / sqrt(2 * num_layers), so that the sum of all layers' contributions keeps its variance. Norms
start at 1. Buffers, which hold how experts are balanced, start at 0.
Source: Radford et al. 2019 (GPT-2), section 2.3: "a factor of 1/sqrt(N) where N is the number of residual layers".
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import nn

from drumline.numerics.random import fill_normal_
from drumline.recipe.sections import Model

_INTO_RESIDUAL = ("o_proj.weight", "down_proj.weight")


class Part(Protocol):
    """A part of a logical tensor: the memory to fill, where it starts, and the shape of the whole."""

    @property
    def tensor(self) -> torch.Tensor: ...

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class _Whole(NamedTuple):
    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def _whole(name: str, parameter: torch.Tensor) -> Part:
    return _Whole(parameter.detach(), (0,) * parameter.ndim, tuple(parameter.shape))


def initialize(module: nn.Module, seed: int, part_of: Callable[[str, torch.Tensor], Part] = _whole) -> None:
    """Fills every parameter and buffer of a decoder (or of a part or sharded form of one) in place.

    Args:
        module: has `shape` (the recipe's model) and parameters with logical names, not on meta.
        seed: the run's seed.
        part_of: what a parameter of a name holds of its logical tensor; by default all of it.
    """
    model: Model = module.shape  # pyright: ignore[reportAssignmentType]
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.zero_()
        for name, parameter in module.named_parameters():
            part = part_of(name, parameter)
            std = weight_std(name, model)
            if std is None:
                part.tensor.fill_(1.0)
            else:
                _fill_piece(part.tensor, part.offsets, part.shape, seed, f"init/{name}", std)


def weight_std(name: str, model: Model) -> float | None:
    """Standard deviation of a parameter's initial values; None for a norm, which starts at 1."""
    if name.split(".")[-2].endswith("norm"):
        return None
    return model.init_std / math.sqrt(2 * model.num_layers) if name.endswith(_INTO_RESIDUAL) else model.init_std


def _fill_piece(
    local: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], seed: int, stream: str, std: float
) -> None:
    if local.numel() == 0:
        return
    row_size = math.prod(shape[1:])
    if local.is_contiguous() and local.dtype == torch.float32 and local.shape[1:] == shape[1:]:
        fill_normal_(local, seed, stream, offsets[0] * row_size, std=std)
        return
    # Cut along a later dim: whole rows are made, some at a time, and this rank's part of each is kept.
    kept = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], local.shape[1:], strict=True))
    num_rows = max(1, (1 << 20) // row_size)
    for row in range(0, local.shape[0], num_rows):
        part = local[row : row + num_rows]
        rows = torch.empty(part.shape[0], *shape[1:], dtype=torch.float32, device=local.device)
        fill_normal_(rows, seed, stream, (offsets[0] + row) * row_size, std=std)
        part.copy_(rows[(slice(None), *kept)])
