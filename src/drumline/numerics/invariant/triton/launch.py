"""The one place that starts a kernel, with the settings that its bits depend on."""

from typing import Any

import torch
from torch import Tensor


def launch(
    kernel: Any, num_programs: int, *arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
) -> None:
    """Runs a kernel on its first argument's device.

    Args:
        kernel: decorated with `triton.jit`.
        num_programs: along the only axis of the grid; 0: nothing is run.
        *arguments: tensors and numbers.
        num_warps: per program.
        num_stages: of a loop's loads that are under way at once; more take more shared memory.
        **constants: the kernel's `tl.constexpr` arguments.
    """
    if not num_programs:
        return
    first: Tensor = arguments[0]
    with torch.cuda.device_of(first):
        # Whether a product and a sum become one rounding is otherwise the compiler's choice, by context.
        settings = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
        kernel[(num_programs,)](*arguments, **settings, **constants)


def num_tiles(size: int, tile: int) -> int:
    """How many tiles cover a size."""
    return -(-size // tile)


def lanes(width: int, most: int = 1024) -> int:
    """The power of two that covers a width, `most` at most: sums by lanes have the same bits for any that does."""
    return min(most, max(2, 1 << (width - 1).bit_length())) if width else 2
