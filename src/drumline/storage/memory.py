"""Tensors as bytes in host memory: views of them, and the reused buffer into which a snapshot is copied."""

import contextlib
import mmap
from collections.abc import Sequence
from typing import Any

import torch

_PAGE = 4096


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor, not a copy.

    Args:
        tensor: contiguous, on the CPU, any dtype and shape.

    Returns:
        A writable one-dimensional view of its bytes.
    """
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _driver() -> Any:
    return torch.cuda.cudart()


class Arena:
    """One page-aligned buffer in host memory that grows to the largest snapshot and is used again for each one.

    Fresh memory is several times slower to fill than memory that was touched before, so reuse is most of the speed of a
    snapshot. On CUDA the buffer is registered with the driver (pinned), so that copies from the device run at the
    link's speed.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False
        self._was_pinned = False  # or at least asked for

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self._bytes.numel()

    def holds(self, num_bytes: int, pin: bool) -> bool:
        """Whether `reserve` would have nothing to do."""
        return num_bytes <= self.num_bytes and (self._was_pinned or not pin)

    def reserve(self, num_bytes: int, *, pin: bool) -> None:
        """Makes the buffer at least this large, and touches its pages. What was in it is lost if it grows.

        Args:
            num_bytes: bytes wanted.
            pin: register the memory with CUDA.
        """
        if num_bytes > self.num_bytes:
            self.release()
            size = -(-num_bytes // _PAGE) * _PAGE
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError, AttributeError, ValueError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._memory = memory
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
            self._bytes.zero_()  # touches the pages, outside the interpreter's lock
        if pin and not self._was_pinned and self.num_bytes:
            self._was_pinned = True
            code = _driver().cudaHostRegister(self._bytes.data_ptr(), self.num_bytes, 0)
            self._is_pinned = int(code) == 0  # where it is refused (locked-memory limit) copies are slower, not wrong

    def release(self) -> None:
        """Gives the memory back. No view of it may be used afterwards."""
        if self._is_pinned:
            _driver().cudaHostUnregister(self._bytes.data_ptr())
        self._is_pinned = self._was_pinned = False
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._memory = None  # unmapped once the last view is gone

    def view(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that lies in the buffer.

        Args:
            start: its first byte; a multiple of the dtype's size.
            shape: of the tensor.
            dtype: of the tensor.

        Returns:
            The tensor.
        """
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[start : start + num_bytes].view(dtype).view(tuple(shape))

    def memory(self, num_bytes: int) -> memoryview:
        """The first bytes of the buffer.

        Args:
            num_bytes: how many.

        Returns:
            A view of them.
        """
        return bytes_of(self._bytes[:num_bytes])
