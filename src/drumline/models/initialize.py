"""Initial weights, the same bits under every sharding.

Element i (row-major, of the whole logical tensor) of parameter `name` is element i of the random stream `init/<name>`,
so a rank fills its piece alone. Weights are normal(0, init_std); what writes into the residual stream (o_proj,
down_proj) is scaled by 1 / sqrt(2 * num_layers), so that the sum of all layers' contributions keeps its variance. Norms
start at 1. Buffers, which hold how experts are balanced, start at 0.
Source: Radford et al. 2019 (GPT-2), section 2.3: "a factor of 1/sqrt(N) where N is the number of residual layers".
"""

import math

import torch
from torch import nn

from drumline.numerics.random import fill_normal_
from drumline.recipe.sections import Model

_INTO_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def initialize(module: nn.Module, seed: int) -> None:
    """Fills every parameter and buffer of a decoder (or of a part or sharded form of one) in place.

    Args:
        module: has `shape` (the recipe's model) and parameters with logical names, not on meta; plain or DTensor, of
            which only the local piece is written.
        seed: the run's seed.
    """
    model: Model = module.shape  # pyright: ignore[reportAssignmentType]
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.zero_()
        for name, parameter in module.named_parameters():
            local, offsets = _local_piece(parameter)
            std = weight_std(name, model)
            if std is None:
                local.fill_(1.0)
            else:
                _fill_piece(local, offsets, tuple(parameter.shape), seed, f"init/{name}", std)


def weight_std(name: str, model: Model) -> float | None:
    """Standard deviation of a parameter's initial values; None for a norm, which starts at 1."""
    if name.split(".")[-2].endswith("norm"):
        return None
    return model.init_std / math.sqrt(2 * model.num_layers) if name.endswith(_INTO_RESIDUAL) else model.init_std


def _local_piece(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What this rank holds of a parameter, and where it lies in the logical tensor."""
    if not hasattr(parameter, "placements"):
        return parameter.detach(), (0,) * parameter.ndim
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    dtensor: DTensor = parameter  # pyright: ignore[reportAssignmentType]
    _, offsets = compute_local_shape_and_global_offset(dtensor.shape, dtensor.device_mesh, dtensor.placements)
    return dtensor.to_local().detach(), tuple(offsets)


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
