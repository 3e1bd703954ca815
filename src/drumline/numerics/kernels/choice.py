"""Whether the kernels run on this machine, and whether they take given tensors."""

import functools

import torch
from torch import Tensor

from drumline.numerics.kernels import causal_attention, layers, loss
from drumline.numerics.kernels.build import KernelError
from drumline.numerics.kernels.operators import DTYPES


def available() -> bool:
    """Whether the kernels run on this machine; the first call may build them, which takes some seconds."""
    return reason() is None


@functools.cache
def reason() -> str | None:
    """Why the kernels do not run here, or None if they do."""
    try:
        for module in (causal_attention, layers, loss):
            module.library()
    except KernelError as error:
        return str(error)
    return None


def take(*tensors: Tensor) -> bool:
    """Whether the kernels run here and take these: eager CPU tensors in fp32 or bf16.

    Tensor subclasses (sharded ones, fake ones) have their own rules, and torch.compile fuses chains of operators
    itself.
    """
    return (
        all(x.device.type == "cpu" and x.dtype in DTYPES and type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
        and not torch.compiler.is_compiling()
        and available()
    )
