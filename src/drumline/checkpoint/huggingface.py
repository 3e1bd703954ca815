"""Hugging Face model folders in and out: config.json beside safetensors files, whole or cut into shards.

Nothing but safetensors and JSON is read. Names, and how experts are stacked: `drumline.checkpoint.huggingface_names`.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drumline.checkpoint.huggingface_config import (
    has_neighbouring_pairs,
    read_config,
    refuse_what_transformers_lacks,
    write_config,
)
from drumline.checkpoint.huggingface_deepseek import BIAS, is_copy, row_order, with_biases, without_absent_modules
from drumline.checkpoint.huggingface_names import in_layers, is_stacked, stored_tensors, to_huggingface
from drumline.checkpoint.piece import Piece
from drumline.models import build
from drumline.recipe.errors import DrumlineError
from drumline.recipe.sections import Model

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DERIVED = re.compile(r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$")  # tables that old versions saved


def parameter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Logical name and shape of every parameter, in the model's order, then of what moves the choice of experts."""
    built = build(model)
    biases = {name: tuple(buffer.shape) for name, buffer in built.named_buffers() if name.endswith(BIAS)}
    return {name: tuple(parameter.shape) for name, parameter in built.named_parameters()} | biases


class HuggingFaceFolder:
    """A folder whose tensors are read when they are asked for, and only the part that is asked for.

    Opening it checks that every parameter is there in the right shape and that nothing is there that would be dropped.

    Args:
        path: holds config.json, and model.safetensors or model.safetensors.index.json with its shards.

    Raises:
        DrumlineError: the folder is incomplete, damaged or of another kind; the message names the file and the tensor.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        model = read_config(self.path)
        self._has_neighbouring_pairs = has_neighbouring_pairs(self.path)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        located = self._locate()
        self.model = without_absent_modules(model, located)
        self._shapes = parameter_shapes(self.model)
        self._check(located)

    @property
    def names(self) -> tuple[str, ...]:
        """Logical names of the tensors."""
        return tuple(self._shapes)

    def read(
        self, name: str, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Reads a tensor or a box of it.

        Args:
            name: logical name.
            offsets: where the box starts; None: at the origin.
            shape: the box's shape; None: up to the end.

        Returns:
            The box on the CPU, in the dtype of the file.

        Raises:
            DrumlineError: no such tensor.
        """
        whole = self._shape(name)
        starts = offsets or (0,) * len(whole)
        ends = whole if shape is None else [start + size for start, size in zip(starts, shape, strict=True)]
        box = tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))
        theirs = in_layers(name, self.model.num_layers)
        if not is_stacked(theirs):
            order = row_order(name, self.model) if self._has_neighbouring_pairs else None
            stored = self._slice(to_huggingface(theirs))
            return stored[box] if order is None else stored[:][order][box]
        experts = [self._slice(to_huggingface(theirs, expert))[box[1:]] for expert in range(starts[0], ends[0])]
        return torch.stack(experts)

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Copies the folder's weights into a model's pieces, converting to each piece's dtype.

        Args:
            pieces: those named `model.<logical name>` are filled; others (optimizer state) are left alone.

        Raises:
            DrumlineError: a piece has another global shape than the folder's tensor.
        """
        for piece in pieces:
            group, _, name = piece.name.partition(".")
            if group != "model":
                continue
            shape = self._shape(name)
            if shape != piece.global_shape:
                theirs = in_layers(name, self.model.num_layers)
                theirs = name if is_stacked(theirs) else to_huggingface(theirs)
                raise DrumlineError(
                    f"{self.path}: {theirs} has shape {list(shape)}, but the run's {name} has "
                    f"{list(piece.global_shape)}\n  try: make the recipe's model section that of config.json"
                )
            if piece.tensor.numel():
                piece.tensor.copy_(self.read(name, piece.offsets, tuple(piece.tensor.shape)))

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise DrumlineError(f"{self.path} has no tensor for {name!r}")
        return self._shapes[name]

    def _slice(self, theirs: str):
        return self._open(self._file_of[theirs]).get_slice(theirs)

    def _open(self, file: str):
        if file not in self._files:
            path = self.path / file
            if not path.is_file():
                raise DrumlineError(f"{self.path} is incomplete: {file} is missing")
            try:
                self._files[file] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise DrumlineError(f"{path} is no whole safetensors file (cut off or damaged): {error}") from None
        return self._files[file]

    def _locate(self) -> dict[str, str]:
        """File of each tensor, by transformers' names."""
        index = self.path / _INDEX
        if index.is_file():
            return self._read_index(index)
        if (self.path / _SINGLE).is_file():
            return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        pickles = sorted(path.name for path in self.path.glob("*.bin"))
        if pickles:
            raise DrumlineError(
                f"{self.path} has only pickled weights ({pickles[0]}), which can run code when read and are refused"
                "\n  try: transformers' save_pretrained(..., safe_serialization=True)"
            )
        raise DrumlineError(f"{self.path} has neither {_SINGLE} nor {_INDEX}")

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            located = json.loads(index.read_text())["weight_map"]
            files = set(located.values())
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise DrumlineError(f"{index} is no index of shards: {type(error).__name__}: {error}") from None
        for file in sorted(map(str, files)):
            if Path(file).name != file:
                raise DrumlineError(f"{index} names {file!r}, which lies outside of the folder")
            held = set(self._open(file).keys())
            absent = sorted(name for name, its_file in located.items() if its_file == file and name not in held)
            if absent:
                raise DrumlineError(f"{index} places {absent[0]} in {file}, which does not hold it")
        return located

    def _check(self, located: Mapping[str, str]) -> None:
        wanted = {}
        for name, shape in self._shapes.items():
            wanted |= stored_tensors(in_layers(name, self.model.num_layers), shape)
        faults = []
        for theirs, shape in wanted.items():
            if theirs not in located:
                faults.append(f"{theirs} is missing")
                continue
            found = self._open(located[theirs]).get_slice(theirs).get_shape()
            if tuple(found) != shape:
                faults.append(f"{theirs} has shape {list(found)}, but config.json asks for {list(shape)}")
            self._file_of[theirs] = located[theirs]
        known = {*wanted, "lm_head.weight"}
        strangers = (
            name
            for name in located
            if name not in known and not _DERIVED.search(name) and not is_copy(name, self.model)
        )
        faults += [f"{name} has no place in the model" for name in strangers]
        if faults:
            shown = (*faults[:10], *([f"and {len(faults) - 10} more"] if len(faults) > 10 else ()))
            raise DrumlineError("\n  ".join((f"{self.path}: the weights do not fit config.json:", *shown)))


def export_huggingface(
    path: Path | str,
    model: Model,
    read: Callable[[str], torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    extra_config: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Writes a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    It is written under another name and renamed when it is whole; memory is that of one shard.

    Args:
        path: the folder; must not exist, or be empty.
        model: the shape.
        read: gives the whole tensor of a logical name, also of a bias that moves the choice of experts.
        dtype: of the weights; None: as they are read.
        max_shard_bytes: a shard is closed before it would pass this.
        extra_config: further keys of config.json, such as bos_token_id.

    Returns:
        The files written.

    Raises:
        DrumlineError: the folder has something in it, transformers has no such model, or a tensor has the wrong shape.
    """
    refuse_what_transformers_lacks(model)
    model, read = with_biases(model, read)
    path = Path(path).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DrumlineError(f"{path} is there already and is not an empty folder\n  try: another place, or remove it")
    unfinished = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        _write(unfinished, model, read, dtype, max_shard_bytes, extra_config)
        if path.exists():
            path.rmdir()
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return sorted(path.iterdir())


def _write(folder, model, read, dtype, max_shard_bytes, extra_config) -> None:
    """Writes the shards, then names them: how many there are is known at the end only."""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    num_bytes = total_bytes = 0
    dtypes = set()

    def close() -> None:
        shards.append(sorted(shard))
        path = folder / f"{len(shards)}.safetensors"
        try:
            save_file(dict(sorted(shard.items())), path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise DrumlineError(f"{path} cannot be written: {error}") from error
        shard.clear()

    for name, shape in parameter_shapes(model).items():
        tensor = read(name).detach()
        is_bias = name.endswith(BIAS)  # small steps of it would be lost in fewer bits
        tensor = tensor.to("cpu", tensor.dtype if dtype is None or is_bias else dtype)
        if tuple(tensor.shape) != shape:
            raise DrumlineError(f"{name} has shape {list(tensor.shape)}, but the model asks for {list(shape)}")
        if not is_bias:
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
        order = row_order(name, model)
        if order is not None:
            tensor = tensor[order.argsort()]
        stored = in_layers(name, model.num_layers)
        # An expert of a stack is a tensor of its own there; clone, since a shard may hold no views of one storage.
        parts = [part.clone() for part in tensor] if is_stacked(stored) else [tensor]
        for theirs, part in zip(stored_tensors(stored, shape), parts, strict=True):
            size = part.numel() * part.element_size()
            if shard and num_bytes + size > max_shard_bytes:
                close()
                num_bytes = 0
            shard[theirs] = part.contiguous()
            num_bytes, total_bytes = num_bytes + size, total_bytes + size
    close()
    _name_shards(folder, shards, total_bytes)
    (folder / "config.json").write_text(write_config(model, min(dtypes), extra_config))


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    if len(shards) == 1:
        (folder / "1.safetensors").rename(folder / _SINGLE)
        return
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        (folder / f"{i + 1}.safetensors").rename(folder / file)
    located = {name: file for names, file in zip(shards, files, strict=True) for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(located.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
