"""Operators inside modules: what each gave and got, as hashes and sums, and the line of the model that called it.

    2/forward/layers.0.attention.q_proj/aten.mm.0@m3                the first mm of the module's call in micro-batch 3
    2/backward/layers.0.attention.q_proj/aten.mm.0>aten.mm.1@m3.tp1     the second mm of its gradient, of tp rank 1

A rank's operators of a step lie in one safetensors file: in its header what each is, in its tensors

    hashes, inputs     int64 [O], the bits of the hashes of what an operator gave, and of all that it got
    statistics         float64 [O, 8], of what it gave
"""

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drumline.capture.digest import Digest, Statistics
from drumline.capture.files import DamagedCaptureError
from drumline.capture.keys import BACKWARD, FORWARD, RECOMPUTE

PHASES = (FORWARD, RECOMPUTE, BACKWARD)
_SIGN, _WORD = 1 << 63, 1 << 64


@dataclass(frozen=True)
class Operator:
    """One output of one call of an operator.

    Attributes:
        step: from 1.
        phase: `forward`, `recompute` (activation checkpointing runs it again) or `backward`.
        module: logical name of the innermost module, with `#1` where it is that module's second call, and so on.
        name: such as `aten.mm`.
        index: how many of this name came before it in the module's call, or in the gradient of one operator.
        gradient_of: in the backward the operator of the forward whose gradient it is part of, such as `aten.mm.0`.
        output: which of its outputs.
        microbatch: of the global batch.
        place: along the axes that cut modules, such as `.tp1`; empty where none does.
        source: line of the model that called it, of the forward in the backward, such as `models/decoder.py:58`.
        shape: of the output on this rank.
        dtype: of the output.
        digest: of the output, with statistics.
        inputs: hash of all tensors that it got.
    """

    step: int
    phase: str
    module: str
    name: str
    index: int
    gradient_of: str
    output: int
    microbatch: int
    place: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    digest: Digest
    inputs: int

    @property
    def key(self) -> str:
        """Says which it is, in every capture of layouts that cut modules alike."""
        return f"{self.step}/{self.phase}/{self.module}/{self.label}@m{self.microbatch}{self.place}"

    @property
    def label(self) -> str:
        """Which operator of its module it is."""
        number = f"{self.index}[{self.output}]" if self.output else str(self.index)
        return f"{self.gradient_of}>{self.name}.{number}" if self.gradient_of else f"{self.name}.{number}"


_TEXT = [name for name in Operator.__dataclass_fields__ if name not in ("digest", "inputs")]


def write_operators(operators: Sequence[Operator], path: Path) -> None:
    """Writes a rank's operators of a step into a new file, in their order."""
    tensors = {
        "hashes": torch.tensor([_signed(each.digest.hash) for each in operators], dtype=torch.int64),
        "inputs": torch.tensor([_signed(each.inputs) for each in operators], dtype=torch.int64),
        "statistics": torch.tensor(
            [astuple(each.digest.statistics) for each in operators if each.digest.statistics is not None],
            dtype=torch.float64,
        ).view(-1, 8),
    }
    listed = [[getattr(each, name) for name in _TEXT] for each in operators]
    save_file(tensors, path, metadata={"operators": json.dumps({"fields": _TEXT, "rows": listed})})


def read_operators(path: Path) -> list[Operator]:
    """Reads all that `write_operators` wrote.

    Args:
        path: of the file.

    Returns:
        The operators, in their order.

    Raises:
        DamagedCaptureError: it is no such file, or is cut off.
    """
    try:
        with safe_open(path, "pt") as file:
            found = json.loads(file.metadata()["operators"])
            hashes, inputs, statistics = (file.get_tensor(n).tolist() for n in ("hashes", "inputs", "statistics"))
        made = []
        for row, bits, got, sums in zip(found["rows"], hashes, inputs, statistics, strict=True):
            fields = dict(zip(found["fields"], row, strict=True))
            fields["shape"] = tuple(fields["shape"])
            made.append(Operator(**fields, digest=Digest(bits % _WORD, Statistics(*sums)), inputs=got % _WORD))
        return made
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise DamagedCaptureError(f"{path} is no file of operators, or is cut off: {error}") from error


def _signed(hash_: int) -> int:
    return hash_ - _WORD if hash_ >= _SIGN else hash_
