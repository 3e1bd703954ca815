"""Readers of one file: plain text, JSON lines, Parquet. Each streams pieces of documents and holds a few MB at most."""

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Literal, cast

from drumline.data.files import File
from drumline.data.text import Counts, Invalid, Piece, in_pieces, without_surrogates
from drumline.recipe.errors import DrumlineError

Documents = Literal["auto", "file", "page", "line", "paragraph"]

CHUNK_BYTES = 1 << 20
LARGE_BYTES = 1 << 20
PAGE_CHARS = 1 << 16
UNDIVIDED_CHARS = 1 << 22  # of a document that has not ended yet, no more than this is held
PARQUET_ROWS = 512
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(file: File, documents: Documents, invalid: Invalid, counts: Counts) -> Iterator[Piece]:
    """Reads UTF-8 text.

    Args:
        file: the file, plain or gzip.
        documents: what a document is: the file, a line, a paragraph (up to an empty line), a page (some 64 KiB);
            auto: the file, but pages where it is above 1 MiB and so a collection of something.
        invalid: what to do with a file that is not UTF-8 text; auto: an error if the user named it, else left out.
        counts: where a file that is left out or repaired is counted.

    Yields:
        The pieces of its documents.

    Raises:
        DrumlineError: the file is not text; says at which byte.
    """
    fault = _fault(file.path)
    if fault:
        policy = invalid if invalid != "auto" else "error" if file.named else "skip"
        if policy == "error":
            raise DrumlineError(
                f"{file.path} {fault}\n  --invalid replace reads it anyway, --invalid skip leaves it out"
            )
        if policy == "skip":
            counts.num_skipped += 1
            return
        counts.num_replaced += 1
    cut = ("page" if file.num_bytes > LARGE_BYTES else "file") if documents == "auto" else documents
    text, pending_bytes, is_open = "", 0, False  # is_open: pieces of an unfinished document are out already
    is_empty = True
    with _open(file.path) as stream:
        for chunk, num_bytes in _decoded(stream, file.path):
            text += chunk
            pending_bytes += num_bytes
            is_empty = is_empty and not text.strip()
            if end := _last_border(text, cut):
                yield from _cut(text[:end], cut, pending_bytes, is_open=is_open)
                text, pending_bytes, is_open = text[end:], 0, False
            elif len(text) >= UNDIVIDED_CHARS:
                yield from in_pieces(text, pending_bytes, ends_document=False)
                text, pending_bytes, is_open = "", 0, True
    if is_empty and not is_open:
        yield Piece("", True, file.num_bytes)
    else:
        yield from _cut(text, cut, pending_bytes, is_open=is_open)


def read_json_lines(file: File, field: str, invalid: Invalid, counts: Counts) -> Iterator[Piece]:
    """Reads one field of each line's JSON object.

    Args:
        file: the file, plain or gzip.
        field: name of the field that holds the text.
        invalid: skip leaves out a line that has no text; replace reads bytes that are not UTF-8 as U+FFFD.
        counts: where such lines, and characters that cannot be encoded, are counted.

    Yields:
        The pieces of its documents.

    Raises:
        DrumlineError: a line is no JSON object with such a field; says which line.
    """
    with _open(file.path) as stream:
        for number, (line, num_bytes) in enumerate(_lines(stream, file.path), 1):
            if not line.strip():
                continue
            try:
                text = _field_of_line(line.decode("utf-8", "replace") if invalid == "replace" else line, field)
            except ValueError as error:
                if invalid == "skip":
                    counts.num_skipped += 1
                    continue
                raise DrumlineError(f"{file.path}, line {number}: {error}") from error
            yield from in_pieces(without_surrogates(text, counts), num_bytes)


def read_parquet(file: File, field: str, counts: Counts) -> Iterator[Piece]:
    """Reads one column of strings; a null is an empty document.

    Args:
        file: the file.
        field: name of the column that holds the text.
        counts: where characters that cannot be encoded are counted.

    Yields:
        The pieces of its documents.

    Raises:
        DrumlineError: pyarrow is not installed, the file is no Parquet, or it has no such column of strings.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DrumlineError("reading Parquet needs pyarrow: pip install 'drumline[parquet]'") from error
    try:
        table = parquet.ParquetFile(file.path)
    except (arrow.ArrowInvalid, OSError) as error:
        raise DrumlineError(f"{file.path} is not a Parquet file: {str(error).splitlines()[0]}") from error
    with table:
        schema = table.schema_arrow
        if field not in schema.names:
            raise DrumlineError(
                f"{file.path} has no column {field!r}: it has {', '.join(schema.names)}; name it with --field"
            )
        kind = schema.field(field).type
        stored = kind.value_type if arrow.types.is_dictionary(kind) else kind
        if not any(is_kind(stored) for is_kind in (arrow.types.is_string, arrow.types.is_large_string)):
            raise DrumlineError(f"{file.path}: column {field!r} holds {kind}, not strings")
        share = Share(file.num_bytes, table.metadata.num_rows)
        try:
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[field]):
                for text in batch.column(0).to_pylist():
                    yield from in_pieces(without_surrogates(text or "", counts), share.next())
        except arrow.ArrowException as error:
            raise DrumlineError(f"{file.path} is damaged: {str(error).splitlines()[0]}") from error


class Share:
    """Deals a number of bytes evenly to rows, so that progress by bytes ends at the total.

    Args:
        num_bytes: the total.
        num_rows: how many rows share it.
    """

    def __init__(self, num_bytes: int, num_rows: int):
        self._num_bytes = num_bytes
        self._num_rows = max(1, num_rows)
        self._row = 0

    def next(self) -> int:
        """Returns the next row's bytes."""
        self._row += 1
        return self._num_bytes * self._row // self._num_rows - self._num_bytes * (self._row - 1) // self._num_rows


def _field_of_line(line: bytes | str, field: str) -> str:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        if line.lstrip()[:1] in (b"[", "["):
            raise ValueError("a JSON array, not one object a line: `jq -c '.[]'` makes lines of it") from error
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {_json_name(record)}, not an object such as {{{json.dumps(field)}: ...}}")
    if field not in record:
        names = ", ".join(list(record)[:8]) or "none"
        raise ValueError(
            f"no field {field!r}; it has {names}\n"
            "  name the field with --field, or leave such lines out with --invalid skip"
        )
    if not isinstance(record[field], str):
        raise ValueError(f"field {field!r} is a JSON {_json_name(record[field])}, not a string")
    return record[field]


def _json_name(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _open(path: Path) -> IO[bytes]:
    try:
        return cast(IO[bytes], gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")
    except OSError as error:
        raise DrumlineError(f"cannot read {path}: {error.strerror}") from error


def _read(stream: IO[bytes], path: Path, read: Callable[[], bytes]) -> Iterator[tuple[bytes, int]]:
    """Yields what `read` returns until it is empty, and the bytes of the file (packed, if it is) that each took."""
    packed = getattr(stream, "fileobj", None) or stream
    before = 0
    try:
        while data := read():
            position = packed.tell()
            yield data, position - before
            before = position
    except (OSError, EOFError, zlib.error) as error:  # what gzip raises for a damaged file
        raise DrumlineError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _chunks(stream: IO[bytes], path: Path) -> Iterator[tuple[bytes, int]]:
    return _read(stream, path, lambda: stream.read(CHUNK_BYTES))


def _lines(stream: IO[bytes], path: Path) -> Iterator[tuple[bytes, int]]:
    for number, (line, num_bytes) in enumerate(_read(stream, path, stream.readline)):
        yield line.removeprefix(codecs.BOM_UTF8) if number == 0 else line, num_bytes


def _decoded(stream: IO[bytes], path: Path) -> Iterator[tuple[str, int]]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    for chunk, num_bytes in _chunks(stream, path):
        yield decoder.decode(chunk), num_bytes
    yield decoder.decode(b"", final=True), 0


def _fault(path: Path) -> str | None:
    """Says why a file is not UTF-8 text; None where it is."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    done = 0
    with _open(path) as stream:
        for chunk, _ in _chunks(stream, path):
            if done == 0 and chunk[:2] in UTF16_MARKS:
                return f"looks like UTF-16: convert it, `iconv -f UTF-16 -t UTF-8 {path}`"
            if (place := chunk.find(0)) >= 0:
                return f"is not text: it has a NUL byte at byte {done + place:,}"
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                return f"is not UTF-8 text: {error.reason} at byte {done - pending + error.start:,}"
            done += len(chunk)
        if decoder.getstate()[0]:
            return f"is not UTF-8 text: it ends within a character, at byte {done - len(decoder.getstate()[0]):,}"
    return None


def _last_border(text: str, cut: str) -> int:
    """Returns where the text read so far can be divided; 0 where it cannot yet."""
    if cut == "file":
        return 0
    if cut == "line":
        return text.rfind("\n") + 1
    if cut == "paragraph":
        place = max(text.rfind("\n\n"), text.rfind("\n\r\n"))
        return text.find("\n", place + 1) + 1 if place >= 0 else 0
    return _good_end(text, 0, len(text)) if len(text) >= CHUNK_BYTES else 0


def _good_end(text: str, begin: int, end: int) -> int:
    """Returns the last line end in text[begin:end], else the last space, else its end."""
    return text.rfind("\n", begin, end) + 1 or text.rfind(" ", begin, end) + 1 or end


def _cut(text: str, cut: str, num_bytes: int, *, is_open: bool) -> Iterator[Piece]:
    """Divides text into documents; the last one carries all of the bytes."""
    if cut == "file":
        parts = [text]
    elif cut == "line":
        parts = [line.rstrip("\r") for line in text.split("\n")]
    elif cut == "paragraph":
        parts = _paragraphs(text)
    else:
        parts = _of_equal_size(text)
    # A part without text is no document, except the one that ends the document whose beginning is out already.
    parts = [part for number, part in enumerate(parts) if part.strip() or (is_open and number == 0)]
    for number, part in enumerate(parts, 1):
        yield from in_pieces(part, num_bytes if number == len(parts) else 0)


def _paragraphs(text: str) -> list[str]:
    paragraphs: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            paragraphs[-1].append(line.rstrip("\r"))
        elif paragraphs[-1]:
            paragraphs.append([])
    return ["\n".join(lines) for lines in paragraphs]


def _of_equal_size(text: str) -> list[str]:
    parts, begin = [], 0
    while len(text) - begin > 1.5 * PAGE_CHARS:
        end = _good_end(text, begin, begin + PAGE_CHARS)
        parts.append(text[begin:end])
        begin = end
    return [*parts, text[begin:]]
