"""Hugging Face datasets: by name, streamed; or a folder that `save_to_disk` wrote. Needs the `datasets` extra."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from drumline.data.readers import Share
from drumline.data.text import Counts, Piece, in_pieces, without_surrogates
from drumline.recipe.errors import DrumlineError

PREFIX = "hf:"


def is_saved_dataset(path: Path) -> bool:
    """Says whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""

    def has(name: str) -> bool:
        return os.path.isfile(path / name)  # False, where pathlib's would raise, for a folder that cannot be read

    return has("dataset_dict.json") or (has("state.json") and has("dataset_info.json"))


class HubSource:
    """One split of a dataset.

    Args:
        spec: `hf:NAME`, or the folder of a saved dataset.
        field: name of the column that holds the text.
        split: which split.
        config: which configuration of a named dataset; None: its only one.

    Raises:
        DrumlineError: `datasets` is not installed, or the dataset cannot be loaded or has no such split or column.
    """

    def __init__(self, spec: str, *, field: str, split: str = "train", config: str | None = None):
        self.names: tuple[str, ...] = (f"{spec} ({split})",)
        self.counts = Counts()
        self._spec = spec
        self._field = field
        self._dataset = _load(spec, split, config)
        columns = self._dataset.column_names
        if columns is not None and field not in columns:
            raise DrumlineError(f"{spec} has no column {field!r}: it has {', '.join(columns)}; name it with --field")
        self._num_rows: int | None = len(self._dataset) if hasattr(self._dataset, "__len__") else None
        self.num_bytes: int | None = self._dataset.data.nbytes if self._num_rows is not None else None

    def pieces(self) -> Iterator[Piece]:
        """Yields every row as a document."""
        yield from self._pieces(self.counts)

    def sample(self, num_bytes: int) -> Iterator[str]:
        """Yields the first rows, until num_bytes of text are reached."""
        taken = 0
        for piece in self._pieces(Counts()):
            yield piece.text
            taken += len(piece.text)
            if taken >= num_bytes:
                return

    def _pieces(self, counts: Counts) -> Iterator[Piece]:
        share = Share(self.num_bytes or 0, self._num_rows or 1)
        for number, text in enumerate(_texts(self._dataset, self._spec, self._field)):
            if text is not None and not isinstance(text, str):
                raise DrumlineError(
                    f"{self._spec}, row {number}: {self._field!r} holds {type(text).__name__}, not text"
                )
            text = without_surrogates(text or "", counts)
            yield from in_pieces(text, share.next() if self._num_rows else len(text.encode()))


def _texts(dataset: Iterable[Any], spec: str, field: str) -> Iterator[Any]:
    rows = iter(dataset)
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # whatever a network, a file format or a loading script raises
            raise DrumlineError(f"cannot read row {number} of {spec}: {_first_line(error)}") from error
        if field not in row:
            raise DrumlineError(f"{spec} has no column {field!r}: it has {', '.join(row)}; name it with --field")
        yield row[field]
        number += 1


def _load(spec: str, split: str, config: str | None) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DrumlineError(
            "reading Hugging Face datasets needs `datasets`: pip install 'drumline[datasets]'"
        ) from error
    name = spec.removeprefix(PREFIX)
    if spec.startswith(PREFIX) and not name:
        raise DrumlineError("hf: needs the name of a dataset, such as hf:roneneldan/TinyStories")
    try:
        if spec.startswith(PREFIX):
            return datasets.load_dataset(name, config, split=split, streaming=True)
        loaded = datasets.load_from_disk(name)
    except Exception as error:  # the library raises many kinds, some of its own and some of its network layer
        raise DrumlineError(f"cannot load {spec} (split {split}): {_first_line(error)}") from error
    if isinstance(loaded, dict):
        if split not in loaded:
            raise DrumlineError(
                f"{spec} has no split {split!r}: it has {', '.join(map(str, loaded))}; name it with --split"
            )
        return loaded[split]
    return loaded


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
