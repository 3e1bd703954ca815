"""How a kernel becomes a torch operator of the namespace `drumline`.

Operators are defined with a schema, a CPU implementation and a shape function, so that fake tensors, dispatch modes
and torch.compile see them; gradients come from an autograd.Function around them. torch.library.custom_op would give
all that in one decorator, but costs 0.2 ms a call and its backward, which is as long as some of these kernels run.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
_LIBRARY = torch.library.Library("drumline", "FRAGMENT")


def define(schema: str, compute: Callable, shapes: Callable, key: str = "CPU") -> Callable:
    """Define an operator.

    Args:
        schema: name, arguments and results in torch's schema language.
        compute: the implementation.
        shapes: the same for fake tensors: results of the right shape and dtype.
        key: the dispatch key that it is for; CompositeExplicitAutograd: tensors of any device.

    Returns:
        The operator.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, compute, key)
    torch.library.register_fake(f"drumline::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.drumline, name).default


def pointers(*tensors: Tensor) -> tuple[ctypes.c_void_p, ...]:
    """The tensors' data, as arguments of a C function. The tensors must outlive the call."""
    return tuple(ctypes.c_void_p(x.data_ptr()) for x in tensors)


def rows_and_width(x: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    """The size of all dims but the last, and of the last, as arguments of a C function."""
    return ctypes.c_int64(x.numel() // max(1, x.shape[-1])), ctypes.c_int64(x.shape[-1])


def mode(x: Tensor) -> tuple[int, int]:
    """Whether x is bf16 and how many threads to use, as arguments of a C function."""
    return int(x.dtype == torch.bfloat16), torch.get_num_threads()
