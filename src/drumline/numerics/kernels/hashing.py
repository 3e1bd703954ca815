"""A 64-bit hash of a tensor's bits, the same however the tensor is cut: parts hash to parts of a sum.

    hash = sum over elements i of mix(bits(x_i) ^ (i G))        modulo 2^64; i is the index in the whole tensor

So ranks hash what they hold, and the sum over ranks that hold each element once is the hash of the logical tensor in
any layout. Each term is a bijection of the element's bits: a change of one element is always seen, any other change
but once in 2^64. It is no defence against whoever wants two tensors to look alike. The C++ is in hash.cpp; elsewhere,
and on other devices, torch's integers compute the same.
"""

import ctypes
import functools

import torch
from torch import Tensor

from drumline.numerics.kernels.build import KernelError, load

_G, _M = 0x9E3779B97F4A7C15 - (1 << 64), 0xD6E8FEB86659FD93 - (1 << 64)  # as int64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
_WORD = 1 << 64


def hash_bits(tensor: Tensor, starts_R: Tensor) -> int:
    """Hashes a part of a tensor.

    Args:
        tensor: the part: R runs of elements that are neighbours in the whole tensor, one run behind the other.
        starts_R: int64 on the CPU; where each run begins in the whole tensor, counted in elements.

    Returns:
        A number in [0, 2^64). Those of parts that share no element add up, modulo 2^64.
    """
    if not tensor.numel():
        return 0
    tensor = tensor.detach().contiguous()
    length = tensor.numel() // len(starts_R)
    if tensor.device.type == "cpu" and _has_kernel():
        starts_R = starts_R.contiguous()
        return library().drumline_hash(
            ctypes.c_void_p(tensor.data_ptr()),
            tensor.element_size(),
            ctypes.c_int64(length),
            ctypes.c_void_p(starts_R.data_ptr()),
            ctypes.c_int64(len(starts_R)),
            torch.get_num_threads(),
        )
    return hash_by_torch(tensor, starts_R)


def hash_by_torch(tensor: Tensor, starts_R: Tensor) -> int:
    """As `hash_bits`, by torch's own integers: on any device, without a compiler."""
    bits_N = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    length, mask = len(bits_N) // max(1, len(starts_R)), (1 << 8 * tensor.element_size()) - 1
    total = 0
    for at in range(0, len(bits_N), _CHUNK):
        part_N = bits_N[at : at + _CHUNK].to(torch.int64)
        part_N = part_N if mask == _WORD - 1 else part_N & mask
        place_N = torch.arange(at, at + len(part_N), device=bits_N.device)
        index_N = starts_R.to(bits_N.device)[place_N // length] + place_N % length
        z_N = part_N ^ (index_N * _G)
        z_N = (z_N ^ _shifted(z_N, 32)) * _M
        total += int((z_N ^ _shifted(z_N, 29)).sum())
    return total % _WORD


def _shifted(x: Tensor, count: int) -> Tensor:
    """A shift to the right of unsigned numbers."""
    return (x >> count) & ((1 << (64 - count)) - 1)


@functools.cache
def _has_kernel() -> bool:
    try:
        library()
    except KernelError:
        return False
    return True


@functools.cache
def library() -> ctypes.CDLL:
    """The built library; raises KernelError where it cannot be had."""
    library = load("hash", check=_check)
    library.drumline_hash.restype = ctypes.c_uint64
    return library


def _check(library: ctypes.CDLL) -> None:
    """Compares a fresh build with torch, so that a miscompiled kernel is never used."""
    library.drumline_hash.restype = ctypes.c_uint64
    for dtype in _INTEGERS.values():
        numbers = torch.arange(-91, 909).to(dtype)
        starts = torch.tensor([7, 3_000_000_019])
        found = library.drumline_hash(
            ctypes.c_void_p(numbers.data_ptr()),
            numbers.element_size(),
            ctypes.c_int64(500),
            ctypes.c_void_p(starts.data_ptr()),
            ctypes.c_int64(2),
            1,
        )
        if found != hash_by_torch(numbers, starts):
            raise KernelError(f"the built kernel of hashes is wrong here for {dtype}")
