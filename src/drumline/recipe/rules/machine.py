"""The machine that a recipe is for, and the rules that only it can answer. What is not known is not judged."""

import difflib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from drumline.recipe.problem import Problem, problem
from drumline.recipe.sections import Recipe


@dataclass(frozen=True)
class Machine:
    """What is known about where the run will be.

    Attributes:
        world_size: ranks that run.
        device: what computes.
        has_bf16: the device multiplies bf16 (CUDA: compute capability 8.0 or more); CPUs always can.
        accelerators: names that `metrics.peak` may have.
    """

    world_size: int | None = None
    device: Literal["cpu", "cuda"] | None = None
    has_bf16: bool = True
    accelerators: Collection[str] | None = None


def _device(recipe: Recipe, machine: Machine) -> str | None:
    return recipe.run.device if recipe.run.device != "auto" else machine.device


def device_is_there(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """CUDA is asked for only where there is some."""
    if recipe.run.device == "cuda" and machine.device == "cpu":
        yield problem(recipe, "device-absent", "run.device", "is not on this machine", ["auto", "cpu"])


def precision_fits_device(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """bf16 needs a device that multiplies it."""
    if recipe.precision.compute == "bf16" and machine.device == _device(recipe, machine) and not machine.has_bf16:
        rule = "is not what this device multiplies (bf16 needs CUDA compute capability 8.0)"
        yield problem(recipe, "precision-device", "precision.compute", rule, ["fp32"])


def attention_fits_device(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """The own kernel is for CPUs, FlexAttention for CUDA."""
    needed = {"kernel": "cpu", "flex": "cuda"}.get(recipe.model.attention)
    device = _device(recipe, machine)
    if needed and device and device != needed:
        rule = f"runs on {needed} only, but the run is on {device}"
        yield problem(recipe, "attention-device", "model.attention", rule, ["auto", "sdpa"])


def peak_is_known(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """`measure`, TFLOP/s as a number, or an accelerator's name."""
    peak = recipe.metrics.peak
    if peak == "measure":
        return
    if re.fullmatch(r"[+-]?[\d.]+([eE][+-]?\d+)?|[+-]?(inf|nan)", peak):
        if not _is_positive(peak):
            rule = "is no peak: TFLOP/s must be a finite number above 0"
            yield problem(recipe, "peak-value", "metrics.peak", rule, ["measure"])
    elif machine.accelerators is not None and peak.lower() not in machine.accelerators:
        near = difflib.get_close_matches(peak.lower(), machine.accelerators, n=3, cutoff=0.3)
        rule = (
            "is no known peak: measure, TFLOP/s as a number, or an accelerator, "
            f"one of {', '.join(sorted(machine.accelerators))}"
        )
        yield problem(recipe, "peak-name", "metrics.peak", rule, near or ["measure"])


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


MACHINE_RULES = (device_is_there, precision_fits_device, attention_fits_device, peak_is_known)
