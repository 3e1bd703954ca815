"""The peak that MFU is measured against: named, given, or the matmul speed that this machine shows now."""

import time

import torch

from drumline.cluster import find
from drumline.comm import World

# Large enough to be bound by arithmetic, small enough for milliseconds on a laptop.
_SIZES = {"cpu": 1024, "cuda": 8192}
_MEASURE_S = 0.2
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def find_peak(setting: str, dtype: torch.dtype, world: World) -> float | None:
    """The peak of all ranks together.

    Args:
        setting: `measure`, an accelerator's name, or TFLOP/s a rank as a number.
        dtype: of the matmuls.
        world: all ranks measure at once, so that ranks that share cores share their peak.

    Returns:
        FLOP/s; None where the named accelerator has no figure for the dtype.
    """
    if setting == "measure":
        world.barrier()
        return float(world.sum([measure_matmul(dtype, world.device)])[0])
    try:
        per_rank: float | None = float(setting) * 1e12
    except ValueError:
        accelerator = find(setting)
        per_rank = accelerator.peak.get(_NAMES[dtype]) if accelerator else None
    return None if per_rank is None else per_rank * world.size


def measure_matmul(dtype: torch.dtype, device: torch.device, duration_s: float = _MEASURE_S) -> float:
    """The best rate of a square matmul, with the threads that the process has.

    Args:
        dtype: of inputs and output.
        device: to measure.
        duration_s: how long to repeat, seconds.

    Returns:
        FLOP/s, counting 2 N^3 a matmul.
    """
    size = _SIZES[device.type]
    # Not zeros: some chips multiply zeros faster.
    pattern = torch.arange(size * size, dtype=torch.float32, device=device).reshape(size, size)
    a = torch.sin(pattern).to(dtype)
    b = torch.cos(pattern).to(dtype)
    torch.mm(a, b)
    best, end = 0.0, time.perf_counter() + duration_s
    while time.perf_counter() < end:
        _wait(device)
        start = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
