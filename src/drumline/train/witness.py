"""A witness of a computation: a digest of every operator's inputs and results, by which two runs of it are compared.

The digest of a tensor is the sum of its elements' bits as integers: any single flipped bit changes it. What operators
read is told apart by where it came from: computed on this rank, or received from another. So the first difference
between two runs says what failed:

    a result differs, its inputs do not       this rank computes wrongly
    an input differs that this rank made      this rank's memory changed it
    an input differs that was received        another rank, or the way from it

Only floating-point tensors are looked at. What communicates is not: its results may still be on their way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drumline.schedules import Action

Role = Literal["result", "input", "received"]

_COMPUTES = frozenset(("aten", "drumline"))
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
# They write all that they return, or nothing: what lay there before says nothing.
_OVERWRITES = frozenset(("aten::copy_", "aten::fill_", "aten::zero_", "aten::scatter_"))
_ALLOCATES = ("aten::empty", "aten::new_empty", "aten::resize_")


@dataclass(frozen=True)
class Difference:
    """Where two runs of a computation first differ.

    Attributes:
        index: of the operator, in the order in which they ran.
        what: the operator, and the phase of the step.
        role: what differs.
    """

    index: int
    what: str
    role: Role


@dataclass(frozen=True)
class Testimony:
    """What a witness saw.

    Attributes:
        seen: for each digest, the operator's index, name with phase, and the tensor's role.
        digests: as many.
    """

    seen: Sequence[tuple[int, str, Role]]
    digests: Sequence[int]

    def first_difference(self, other: "Testimony") -> Difference | None:
        """Compares with another run of the same computation; None where nothing differs."""
        for mine, one, theirs, another in zip(self.seen, self.digests, other.seen, other.digests, strict=False):
            if mine[:2] != theirs[:2]:
                return Difference(mine[0], f"{mine[1]} the first time, {theirs[1]} the second", "result")
            if one != another:
                # Where memory is used again, only one of the runs may know that another rank wrote there.
                return _joined(mine, theirs)
        if len(self.seen) != len(other.seen):
            longer = max(self.seen, other.seen, key=len)[min(len(self.seen), len(other.seen))]
            return Difference(longer[0], f"{longer[1]}, once only", "result")
        return None


def _joined(one: tuple[int, str, Role], other: tuple[int, str, Role]) -> Difference:
    return Difference(*(other if other[2] == "received" else one))


class Witness(TorchDispatchMode):
    """While active, notes digests of what operators read and give; also those of the backward.

    It is a `drumline.parallel.pipeline.Watch`, too, so that it knows whether a forward or a backward runs. What it has
    not seen being made is taken for received: a backend may copy within itself.

    Args:
        held: tensors that this rank has from before, such as weights.
    """

    def __init__(self, held: Iterable[Tensor] = ()):
        super().__init__()
        self._phase = ""
        self._index = 0
        self._seen: list[tuple[int, str, Role]] = []
        self._digests: list[Tensor] = []
        self._made: dict[int, StorageWeakRef] = {}
        self._make(_tensors(list(held)))

    def begin(self, action: Action) -> None:
        """A forward or a backward starts."""
        self._phase = f"{action.kind.name.lower()} of micro-batch {action.microbatch}"

    def end(self) -> None:
        """It has ended."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs the operator and notes what it read and gave."""
        kwargs = kwargs or {}
        schema = func._schema
        if func.namespace not in _COMPUTES:
            result = func(*args, **kwargs)
            # Collectives of the c10d namespace write into what they are given, without saying so in their schemas.
            touched = result if func.namespace == "_c10d_functional" else (args, kwargs, result)
            for x in _tensors(touched):
                self._made.pop(_storage(x), None)
            return result
        written, read = _split(schema, args, kwargs)
        if schema.name.startswith(_ALLOCATES) or _is_view(schema):
            result = func(*args, **kwargs)
            if not _is_view(schema):
                self._make(_tensors(result))
            return result
        self._index += 1
        if not (schema.name in _OVERWRITES or schema.overload_name.endswith("out")):
            read = [*read, *written]
        for x in read:
            self._note(x, schema.name, "input" if self._is_made(x) else "received")
        result = func(*args, **kwargs)
        given = list(_tensors(result))
        kept = {_storage(x) for x in (*read, *written)}  # what is changed in place stays what it was
        self._make([x for x in given if _storage(x) not in kept])
        for x in given or written:
            self._note(x, schema.name, "result")
        return result

    def note_received(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Notes tensors that ranks have made together."""
        self._phase, self._index = "", self._index + 1
        for x in tensors:
            self._note(x, name, "received")

    def testimony(self) -> Testimony:
        """What was seen; waits for the device once."""
        digests = torch.stack(self._digests).tolist() if self._digests else []
        return Testimony(self._seen, digests)

    def _make(self, tensors: Iterable[Tensor]) -> None:
        self._made |= {_storage(x): StorageWeakRef(x.untyped_storage()) for x in tensors}

    def _is_made(self, x: Tensor) -> bool:
        # An address may be used again, by a storage that nobody has seen being made.
        made = self._made.get(_storage(x))
        return made is not None and not made.expired()

    def _note(self, x: Tensor, name: str, role: Role) -> None:
        if x.dtype in _BITS and x.numel():
            self._seen.append((self._index, f"{name} in the {self._phase}" if self._phase else name, role))
            self._digests.append(x.detach().view(_BITS[x.dtype]).sum(dtype=torch.int64))


def _split(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator writes to, and the others that it is given."""
    written, read = list[Tensor](), list[Tensor]()
    values = [*zip(schema.arguments, args, strict=False), *((_of(schema, name), kwargs[name]) for name in kwargs)]
    for argument, value in values:
        is_written = argument is not None and argument.alias_info is not None and argument.alias_info.is_write
        (written if is_written else read).extend(_tensors(value))
    return written, read


def _of(schema: Any, name: str) -> Any:
    return next((argument for argument in schema.arguments if argument.name == name), None)


def _is_view(schema: Any) -> bool:
    infos = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
    return bool(infos) and not any(info.is_write for info in infos)


def _tensors(tree: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf._local_tensor if isinstance(leaf, DTensor) else leaf for leaf in leaves]


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
