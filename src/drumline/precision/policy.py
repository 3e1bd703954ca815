"""The dtypes of a run.

Master weights, optimizer states and gradient sums are fp32; activations and matmuls are in the compute dtype. bf16
keeps fp32's exponent, so no loss scaling is needed; its 8 bits of significand are too few to add a small update to a
weight, which is why the masters are fp32.
Source: Micikevicius et al. 2018, arXiv:1710.03740 (master weights); Kalamkar et al. 2019, arXiv:1905.12322 (bf16).
"""

from dataclasses import dataclass

import torch

from drumline.recipe.sections import Precision

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Policy:
    """Which dtype holds what."""

    parameter: torch.dtype
    """Master weights and optimizer states."""
    compute: torch.dtype
    """Activations, matmuls and the copies of weights that they read."""
    reduce: torch.dtype
    """Gradients while they are summed over micro-batches and ranks."""

    @property
    def is_mixed(self) -> bool:
        """Whether weights are cast before they are used."""
        return self.compute != self.parameter


def policy(precision: Precision) -> Policy:
    """The dtypes that a recipe's precision section asks for."""
    return Policy(parameter=torch.float32, compute=_DTYPES[precision.compute], reduce=_DTYPES[precision.reduce])
