"""A meter: the bytes of tensors that operators made and that are still alive."""

from collections.abc import Iterable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AliveBytes(TorchDispatchMode):
    """While active, watches every storage that an operator returns; also those that checkpointing holds.

    It works on any device, and counts what was asked for, not what an allocator rounds it to.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        """The most bytes that were alive after any operator."""
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs the operator and notes what it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return result

    def now(self, *, apart_from: Iterable[Tensor] = ()) -> int:
        """The bytes that are alive now.

        Args:
            apart_from: tensors whose storages are not counted, such as weights.

        Returns:
            Bytes.
        """
        self._storages = {pointer: entry for pointer, entry in self._storages.items() if not entry[0].expired()}
        left_out = {tensor.untyped_storage().data_ptr() for tensor in apart_from}
        return sum(num_bytes for pointer, (_, num_bytes) in self._storages.items() if pointer not in left_out)
