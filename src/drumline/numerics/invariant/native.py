"""Which of an operator's three forms runs: the C++ kernel, the Triton kernel, or plain torch."""

import ctypes
import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from drumline.numerics.kernels import causal_attention, layers, loss, matmul, rows
from drumline.numerics.kernels.build import KernelError
from drumline.numerics.kernels.operators import DTYPES, define

_EVERY_DEVICE = "CompositeExplicitAutograd"
_OF_TRITON = "cuda"


@functools.cache
def _built(module: ModuleType) -> ctypes.CDLL | None:
    try:
        return module.library()
    except KernelError:
        return None


def library(module: ModuleType, *tensors: Tensor) -> ctypes.CDLL | None:
    """The library of a module of `drumline.numerics.kernels`, or None where plain torch is to run.

    Args:
        module: with a function `library`.
        *tensors: the operator's floating inputs; a kernel takes CPU tensors in fp32 or bf16.

    Returns:
        The built library; None where it cannot be built, or does not take the tensors.
    """
    fits = all(x.device.type == "cpu" and x.dtype in DTYPES for x in tensors)
    return _built(module) if fits else None


def gpu(name: str, *tensors: Tensor) -> ModuleType | None:
    """A module of `drumline.numerics.invariant.triton`, or None where the operator is for another form.

    Args:
        name: of the module.
        *tensors: the operator's floating inputs; a Triton kernel takes CUDA tensors in fp32 or bf16.

    Returns:
        The module; None where its kernels do not take the tensors.

    Raises:
        KernelError: they do, but Triton is not installed: plain torch would give other bits, hundreds of times slower.
    """
    if not all(x.device.type == _OF_TRITON and x.dtype in DTYPES for x in tensors):
        return None
    try:
        return importlib.import_module(f"drumline.numerics.invariant.triton.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise KernelError(
            "batch-invariant operators on CUDA tensors in fp32 and bf16 are Triton kernels, and triton is not "
            "installed\n  what works: pip install 'drumline[triton]', or CPU tensors"
        ) from None


def operator(schema: str, compute, shapes):
    """Defines a torch operator of the namespace `drumline` for tensors of every device."""
    return define(schema, compute, shapes, key=_EVERY_DEVICE)


def like(x: Tensor) -> Tensor:
    """An empty contiguous tensor as x is."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def as_wide(x: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """An empty tensor of x's device, in fp32 at least."""
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


def forms() -> dict[str, str]:
    """What runs here for CPU tensors in fp32 and bf16, by group of operators: `kernel`, or why there is none."""
    found = {}
    for module in (matmul, causal_attention, layers, rows, loss):
        try:
            built = module.library()
        except KernelError as error:
            found[module.__name__.rpartition(".")[2]] = f"plain torch: {error}"
            continue
        has_amx = module is matmul and bool(built.drumline_matmul_has_amx())
        found[module.__name__.rpartition(".")[2]] = "kernel, bf16 on matrix units" if has_amx else "kernel"
    return found
