"""From what a user types to the text it means: `stdlib`, `hf:NAME`, files, folders and patterns, in any number."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from drumline.data import hub, stdlib
from drumline.data.files import File, find_files
from drumline.data.order import Permutation
from drumline.data.prepare import TextSource
from drumline.data.readers import Documents, read_json_lines, read_parquet, read_text
from drumline.data.text import Counts, Invalid, Piece
from drumline.recipe.errors import DrumlineError

SMALLEST_QUOTA_BYTES = 1 << 20


class FileSource:
    """The text of files, one after another.

    Args:
        names: what the user typed, for the manifest.
        files: the files.
        field: the field of JSON lines, or the column of Parquet, that holds the text.
        documents: what a document of a text file is.
        invalid: what to do with what is not text.
    """

    def __init__(
        self,
        names: Sequence[str],
        files: Sequence[File],
        *,
        field: str = "text",
        documents: Documents = "auto",
        invalid: Invalid = "auto",
    ):
        self.names: tuple[str, ...] = tuple(names)
        self.num_bytes: int | None = sum(file.num_bytes for file in files)
        self.counts = Counts()
        self._files = tuple(files)
        self._field = field
        # Were the only file one document, none could be kept for validation.
        self._documents: Documents = "page" if documents == "auto" and len(files) == 1 else documents
        self._invalid: Invalid = invalid

    def pieces(self) -> Iterator[Piece]:
        """Yields every document of every file."""
        for file in self._files:
            yield from self._read(file, self.counts)

    def sample(self, num_bytes: int) -> Iterator[str]:
        """Yields the beginnings of files in a shuffled but fixed order, until num_bytes of text are reached."""
        quota = max(SMALLEST_QUOTA_BYTES, num_bytes // len(self._files))
        order = Permutation(len(self._files), ("drumline", "tokenizer sample"))
        taken = 0
        for place in range(len(self._files)):
            from_file = 0
            for piece in self._read(self._files[order.at(place)], Counts()):
                yield piece.text
                from_file += len(piece.text)
                if from_file >= quota:
                    break
            taken += from_file
            if taken >= num_bytes:
                return

    def _read(self, file: File, counts: Counts) -> Iterator[Piece]:
        if file.kind == "jsonl":
            return read_json_lines(file, self._field, self._invalid, counts)
        if file.kind == "parquet":
            return read_parquet(file, self._field, counts)
        return read_text(file, self._documents, self._invalid, counts)


def open_source(
    specs: Sequence[str],
    *,
    field: str = "text",
    documents: Documents = "auto",
    invalid: Invalid = "auto",
    split: str = "train",
    config: str | None = None,
) -> TextSource:
    """Opens what a user typed.

    Args:
        specs: `stdlib`, `hf:NAME`, the folder of a saved Hugging Face dataset (each alone), or any number of files,
            folders and patterns.
        field: the field of JSON lines, or the column of Parquet or a dataset, that holds the text.
        documents: what a document of a text file is.
        invalid: what to do with what is not text.
        split: the split of a Hugging Face dataset.
        config: the configuration of a Hugging Face dataset.

    Returns:
        The text, not yet read.

    Raises:
        DrumlineError: there is no such source, or it cannot be read.
    """
    if not specs:
        raise DrumlineError("no source: give a file, a folder, a pattern, `hf:NAME` or `stdlib`")
    alone = [spec for spec in specs if spec == stdlib.NAME or spec.startswith(hub.PREFIX) or _is_saved(spec)]
    if alone and len(specs) > 1:
        raise DrumlineError(
            f"{alone[0]} cannot be joined with other sources: prepare each, and mix them in data.sources"
        )
    if specs[0] == stdlib.NAME and alone:
        return stdlib.StdlibSource()
    if alone:
        return hub.HubSource(specs[0], field=field, split=split, config=config)
    files = [file for spec in specs for file in find_files(spec)]
    return FileSource(specs, files, field=field, documents=documents, invalid=invalid)


def _is_saved(spec: str) -> bool:
    return hub.is_saved_dataset(Path(spec).expanduser())
