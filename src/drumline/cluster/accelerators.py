"""Accelerators and their peak rates: dense (no sparsity), per device, as the vendor's data sheet states them.

Rates are FLOP/s of matrix multiplication in a dtype. `fp32` is the rate of true fp32, which `torch` uses unless TF32 is
allowed. A data sheet that gives only the rate with 2:4 sparsity is halved here.
"""

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass

_TERA = 10**12


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator.

    Attributes:
        name: as in `metrics.peak`.
        peak: dtype (`fp32`, `tf32`, `bf16`, `fp16`, `fp8`, `fp4`) -> dense FLOP/s.
        aliases: other names that mean it.
        source: where the rates are published.
    """

    name: str
    peak: Mapping[str, float]
    aliases: tuple[str, ...]
    source: str


def _accelerator(name: str, source: str, *, aliases: tuple[str, ...] = (), **teraflops: float) -> Accelerator:
    peak = {dtype: rate * _TERA for dtype, rate in teraflops.items()}
    return Accelerator(name, types.MappingProxyType(peak), aliases, source)


ACCELERATORS = (
    _accelerator(
        "a100",
        "NVIDIA A100 Tensor Core GPU data sheet (A100 80GB)",
        aliases=("a100-sxm", "a100-pcie"),
        fp32=19.5,
        tf32=156,
        bf16=312,
        fp16=312,
    ),
    _accelerator(
        "h100-sxm",
        "NVIDIA H100 Tensor Core GPU Architecture whitepaper, table 2 (H100 SXM5)",
        aliases=("h100",),
        fp32=66.9,
        tf32=494.7,
        bf16=989.4,
        fp16=989.4,
        fp8=1978.9,
    ),
    _accelerator(
        "h100-pcie",
        "NVIDIA H100 Tensor Core GPU Architecture whitepaper, table 2 (H100 PCIe)",
        fp32=51.2,
        tf32=378,
        bf16=756,
        fp16=756,
        fp8=1513,
    ),
    _accelerator(
        "h200",
        "NVIDIA H200 Tensor Core GPU data sheet (H200 SXM; rates with sparsity halved)",
        aliases=("h200-sxm",),
        fp32=67,
        tf32=494.5,
        bf16=989.5,
        fp16=989.5,
        fp8=1979,
    ),
    _accelerator(
        "b200",
        "NVIDIA HGX B200 data sheet, a device's eighth (rates with sparsity halved)",
        fp32=75,
        tf32=1125,
        bf16=2250,
        fp16=2250,
        fp8=4500,
        fp4=9000,
    ),
    _accelerator(
        "gb200",
        "NVIDIA GB200 NVL72 data sheet, a GPU's 72nd part (rates with sparsity halved)",
        fp32=80,
        tf32=1250,
        bf16=2500,
        fp16=2500,
        fp8=5000,
        fp4=10000,
    ),
    _accelerator(
        "mi300x",
        "AMD Instinct MI300X accelerator data sheet",
        fp32=163.4,
        tf32=653.7,
        bf16=1307.4,
        fp16=1307.4,
        fp8=2614.9,
    ),
    _accelerator("tpu-v5p", "Google Cloud documentation, TPU v5p", aliases=("v5p",), bf16=459),
)

# What a driver calls a device holds these words.
_DRIVER_WORDS = (
    ("gb200", {"gb200"}),
    ("b200", {"b200"}),
    ("h200", {"h200"}),
    ("h100-pcie", {"h100", "pcie"}),
    ("h100-sxm", {"h100", "hbm3"}),
    ("a100", {"a100"}),
    ("mi300x", {"mi300x"}),
    ("tpu-v5p", {"tpu", "v5p"}),
)


def accelerator_names() -> tuple[str, ...]:
    """Every name that `find` knows, aliases included."""
    return tuple(name for accelerator in ACCELERATORS for name in (accelerator.name, *accelerator.aliases))


def find(name: str) -> Accelerator | None:
    """The accelerator of a name or an alias, in any case; None when there is none."""
    wanted = name.lower()
    return next((entry for entry in ACCELERATORS if wanted in (entry.name, *entry.aliases)), None)


def recognize(device_name: str) -> Accelerator | None:
    """The accelerator that a driver names.

    Args:
        device_name: such as `NVIDIA H100 80GB HBM3` (what `torch.cuda.get_device_name` returns).

    Returns:
        The accelerator, or None when the name is not one of the table: a variant with other rates (H100 NVL, a MIG
        slice) must not be taken for its sibling.
    """
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if words & {"mig", "nvl"}:
        return None
    return next((find(name) for name, needed in _DRIVER_WORDS if words >= needed), None)
