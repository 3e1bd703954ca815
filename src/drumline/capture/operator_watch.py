"""Sees every operator that runs inside chosen modules, in the forward and in the backward.

A dispatch mode is on from `start` to `stop`, below autograd and above kernels, so that it sees what a rank computes
under any layout. Hooks say which module runs. In the backward no module runs: an operator there belongs to the autograd
node that is executed, whose number says which operator of the forward it is the gradient of.

Left out: views, which compute nothing; memory that is not filled yet; collectives, which run as they do without a watch
and whose results are seen as inputs of what follows.
"""

import collections
import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import drumline
from drumline.capture.calls import Calls, is_recomputing
from drumline.capture.digest import digest
from drumline.capture.keys import BACKWARD, FORWARD, RECOMPUTE, is_wanted
from drumline.capture.operators import Operator
from drumline.numerics import kernels
from drumline.schedules import Action

_PACKAGE = str(Path(drumline.__file__).parent) + "/"
_OWN, _MODEL = _PACKAGE + "capture/", (_PACKAGE + "models/", _PACKAGE + "parallel/")
_ENGINE, _CHECKPOINT = "_engine_run_backward", torch.utils.checkpoint.__file__
_BLOCK = re.compile(r"layers\.\d+|mtp\.\d+\.block")
_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "fsdp", "prim"))
_UNFILLED = ("empty", "new_empty", "_unsafe_view", "detach", "lift_fresh", "alias")
_START = torch.zeros(1, dtype=torch.int64)
_MIX, _WORD = 0x9E3779B97F4A7C15, 1 << 64


class _Origin(NamedTuple):
    """Which operator of the forward an autograd node is of."""

    microbatch: int
    module: str
    label: str
    source: str


class OperatorWatch:
    """Records the operators of modules.

    Args:
        model: a decoder, or a rank's part of it, with logical names.
        only: patterns of names of modules; what lies in one that matches is watched, too.
        first: the number, among all micro-batches of the global batch, of this rank's first.
        place: of this rank along the axes that cut modules, such as `.tp1`.
    """

    def __init__(self, model: nn.Module, *, only: Sequence[str], first: int = 0, place: str = ""):
        self._model, self._only, self._first, self._place = model, tuple(only), first, place
        self.found: list[Operator] = []
        self._step, self._microbatch = 0, 0
        self._running: list[str] = []
        self._calls = Calls()
        self._counts: collections.Counter[tuple] = collections.Counter()
        self._origins: dict[int, _Origin] = {}
        self._newest_node = -1
        self._undo: list[Callable[[], None]] = []

    def start(self, step: int) -> None:
        """Begins to watch a step, whose number counts from 1."""
        self._step, self._newest_node = step, _newest_node()
        # Within what others hook, so that a gather of weights and the recorder itself are not taken for the module's.
        for name, module in self._model.named_modules():
            if name and is_wanted(name, self._only):
                enter = functools.partial(self._enter, name)
                self._undo.append(module.register_forward_pre_hook(enter).remove)
                self._undo.append(module.register_forward_hook(self._leave, prepend=True, always_call=True).remove)
        mode = _Mode(self)
        mode.__enter__()
        self._undo.append(lambda: mode.__exit__(None, None, None))

    def stop(self) -> None:
        """Ends the watch."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._running.clear()
        self._calls.clear()
        self._counts.clear()
        self._origins.clear()

    def take(self) -> list[Operator]:
        """Gives what was found, and keeps it no longer."""
        found, self.found = self.found, []
        return found

    def begin(self, action: Action) -> None:
        """A forward or backward of a micro-batch starts."""
        self._microbatch = self._first + action.microbatch

    def run(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs an operator, and notes what it gave.

        Args:
            operator: an overload.
            args: its positional arguments.
            kwargs: those by name.

        Returns:
            What it gave.
        """
        found = self._whose()
        if found is None:
            self._newest_node = max(self._newest_node, _newest_node())
            return operator(*args, **kwargs)
        phase, of = found
        is_seen = operator.namespace not in _COLLECTIVES and not _computes_nothing(operator)
        inputs = _hash_of_inputs(operator, args, kwargs) if is_seen else 0
        given = operator(*args, **kwargs)
        label = self._note(operator, args, kwargs, given, inputs, phase, of) if is_seen else ""
        if phase == FORWARD:
            self._remember(_newest_node(), of, label, _named(operator))
        return given

    def _whose(self) -> tuple[str, _Origin] | None:
        """The phase that runs, and the module, or in the backward the operator whose gradient it is; None: neither."""
        caller = _caller()
        if caller.is_recorder:
            return None
        in_backward = is_recomputing()
        if self._running:
            return (RECOMPUTE if in_backward else FORWARD), _Origin(
                self._microbatch, self._running[-1], "", caller.source
            )
        if not in_backward:
            return None
        node = torch._C._current_autograd_node()
        origin = None if node is None else self._origins.get(node._sequence_nr())
        if origin is None:
            return None
        if not caller.is_checkpoint:
            return BACKWARD, origin._replace(source=caller.source if caller.is_model else origin.source)
        # A block is run again by its forward, past its hooks.
        block = _BLOCK.match(origin.module)
        if block is None or not is_wanted(block[0], self._only):
            return None
        return RECOMPUTE, _Origin(origin.microbatch, block[0], "", caller.source)

    def _remember(self, node: int, of: _Origin, label: str, name: str) -> None:
        """Notes whose the newest autograd node is: of a function's operators, the first that computes."""
        if node > self._newest_node:
            self._newest_node = node
            self._origins[node] = of._replace(label=label or name)
        elif label and node in self._origins and not self._origins[node].label[-1].isdigit():
            self._origins[node] = of._replace(label=label)

    def _note(
        self, operator: Any, args: tuple, kwargs: dict[str, Any], given: Any, inputs: int, phase: str, origin: _Origin
    ) -> str:
        name = _named(operator)
        place = origin.microbatch, phase, origin.module, origin.label, name
        index = self._counts[place]
        self._counts[place] += 1
        for number, tensor in enumerate(_outputs(operator, args, kwargs, given)):
            if tensor.is_complex() or tensor.device.type == "meta":
                continue
            self.found.append(
                Operator(
                    step=self._step,
                    phase=phase,
                    module=origin.module,
                    name=name,
                    index=index,
                    gradient_of=origin.label,
                    output=number,
                    microbatch=origin.microbatch,
                    place=self._place,
                    source=origin.source,
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    digest=digest(tensor.contiguous(), _START, with_statistics=True),
                    inputs=inputs,
                )
            )
        return f"{name}.{index}"

    def _enter(self, name: str, module: nn.Module, *_: Any) -> None:
        self._running.append(self._calls.numbered(module, name, is_recomputing(), self._microbatch))

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop()


def _newest_node() -> int:
    """The number of the autograd node that was made last."""
    return torch.autograd._get_sequence_nr() - 1  # pyright: ignore[reportPrivateImportUsage]


class _Mode(TorchDispatchMode):
    """Hands every operator to a watch."""

    def __init__(self, watch: OperatorWatch):
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._watch.run(func, args, kwargs or {})


def _named(operator: Any) -> str:
    return str(operator).removesuffix(".default")


def _computes_nothing(operator: Any) -> bool:
    if operator.is_view:
        return True
    return operator.namespace == "aten" and operator._opname.startswith(_UNFILLED)


def _outputs(operator: Any, args: tuple, kwargs: dict[str, Any], given: Any) -> list[torch.Tensor]:
    """What an operator gave, or where it gives nothing, what it wrote into."""
    found = [_local(leaf) for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if found:
        return found
    written = [value for value, is_written in _arguments(operator, args, kwargs) if is_written]
    return [_local(leaf) for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def _hash_of_inputs(operator: Any, args: tuple, kwargs: dict[str, Any]) -> int:
    """Of all tensors that an operator reads: what it only writes into has no meaning yet."""
    total = 0
    is_in_place = operator._opname.endswith("_")
    for at, (value, is_written) in enumerate(_arguments(operator, args, kwargs)):
        if is_written and not (is_in_place and at == 0):
            continue
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and not leaf.is_complex():
                total = (total * _MIX + kernels.hash_bits(_local(leaf).contiguous(), _START) + 1) % _WORD
    return total


def _arguments(operator: Any, args: tuple, kwargs: dict[str, Any]) -> list[tuple[Any, bool]]:
    """The values of the arguments in the order of the schema, and whether each is written into."""
    found = []
    for at, argument in enumerate(operator._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        found.append((value, argument.alias_info is not None and argument.alias_info.is_write))
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Caller(NamedTuple):
    """Who called an operator: the innermost line of the model, or else of the package."""

    source: str
    is_model: bool
    is_recorder: bool
    is_checkpoint: bool


def _caller() -> _Caller:
    """Looks up the stack, in the backward as far as autograd's engine."""
    frame: FrameType | None = sys._getframe(1)
    other, is_checkpoint, line = "", False, ""
    while frame is not None and frame.f_code.co_name != _ENGINE:
        name = frame.f_code.co_filename
        is_checkpoint |= name == _CHECKPOINT
        if name.startswith(_OWN) and name != __file__:
            return _Caller("", False, True, False)
        if not line and name.startswith(_PACKAGE) and name != __file__:
            here = f"{name.removeprefix(_PACKAGE)}:{frame.f_lineno}"
            line, other = (here, other) if name.startswith(_MODEL) else ("", other or here)
        frame = frame.f_back
    return _Caller(line or other, bool(line), False, is_checkpoint)
