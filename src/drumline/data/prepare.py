"""Text in, a prepared folder out: streaming, in bounded memory, whole or not at all."""

import dataclasses
import errno
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from drumline.data.corpus import Corpus
from drumline.data.digest import new_digest
from drumline.data.folder import building, locked
from drumline.data.manifest import NAME, FileEntry, Manifest, SourceEntry, TokenizerEntry, write_manifest
from drumline.data.text import Counts, Piece
from drumline.data.tokenizer import Tokenizer, bpe_size, load_tokenizer, train_bpe
from drumline.data.writer import SHARD_TOKENS, ShardWriter, dtype_for
from drumline.recipe.errors import DrumlineError

BATCH_CHARS = 1 << 20  # text that is tokenized at a time: its encodings take some 100 bytes a token
BPE_BYTES_AN_ENTRY = 512  # text that a BPE is trained on, for each entry of its vocabulary
BPE_SMALLEST_BYTES, BPE_LARGEST_BYTES = 1 << 22, 1 << 26
BPE_DOCUMENT_CHARS = 1 << 16  # of one document no more than this
TOKENIZER_NAME = "tokenizer.json"


class TextSource(Protocol):
    """What `prepare` reads: the pieces of documents, in an order that never changes.

    Attributes:
        names: what the user asked for, for the manifest.
        num_bytes: bytes that `pieces` reads in all, None where nobody knows.
        counts: what was left out or changed while `pieces` ran.
    """

    names: tuple[str, ...]
    num_bytes: int | None
    counts: Counts

    def pieces(self) -> Iterator[Piece]:
        """Yields every document's text, piece by piece."""
        ...

    def sample(self, num_bytes: int) -> Iterator[str]:
        """Yields texts from all over the source, about num_bytes in all."""
        ...


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a preparation is.

    Attributes:
        stage: what is being done.
        done_bytes: bytes of the source that were read.
        total_bytes: bytes of the source; None where nobody knows.
        num_tokens: tokens written.
        num_documents: documents written.
    """

    stage: str
    done_bytes: int
    total_bytes: int | None
    num_tokens: int
    num_documents: int


def quiet(progress: Progress) -> None:
    """Reports nothing."""


def prepare(
    source: TextSource,
    out: Path,
    *,
    tokenizer: str,
    eos: str | None = None,
    validation_fraction: float | None = None,
    overwrite: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    report: Callable[[Progress], None] = quiet,
) -> Manifest:
    """Turns text into a folder of token shards.

    Args:
        source: the text.
        out: the folder to make.
        tokenizer: `bytes`, `bpe:SIZE`, or the path of a `tokenizer.json`.
        eos: text of the end-of-document token, for a `tokenizer.json` that does not say.
        validation_fraction: share of documents kept for validation in every run; None: each recipe says.
        overwrite: replace a prepared folder that is there.
        shard_tokens: tokens after which a new shard is begun.
        report: called often, with how far it is.

    Returns:
        The manifest of the folder.

    Raises:
        DrumlineError: the source is unreadable or empty, the tokenizer does not exist, or the folder cannot be written.
    """
    if bpe_size(tokenizer) is None:
        load_tokenizer(tokenizer, eos)  # a wrong name is told before any work
    _check_free(out, overwrite)
    with locked(out):
        _check_free(out, overwrite)
        return build(
            source,
            out,
            tokenizer=tokenizer,
            eos=eos,
            validation_fraction=validation_fraction,
            overwrite=overwrite,
            shard_tokens=shard_tokens,
            report=report,
        )


def build(
    source: TextSource,
    out: Path,
    *,
    tokenizer: str,
    eos: str | None = None,
    validation_fraction: float | None = None,
    overwrite: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    report: Callable[[Progress], None] = quiet,
) -> Manifest:
    """Does the work of `prepare` for a caller that holds the folder's lock."""
    try:
        with building(out, overwrite=overwrite) as folder:
            size = bpe_size(tokenizer)
            if size is None:
                made = load_tokenizer(tokenizer, eos)
            else:
                report(Progress("training the tokenizer", 0, None, 0, 0))
                num_bytes = min(max(BPE_BYTES_AN_ENTRY * size, BPE_SMALLEST_BYTES), BPE_LARGEST_BYTES)
                made = train_bpe(size, (text[:BPE_DOCUMENT_CHARS] for text in source.sample(num_bytes)))
            manifest = _write(source, folder, made, validation_fraction, shard_tokens, report)
            write_manifest(folder, manifest)
            Corpus(folder)  # what was written can be opened
        return manifest
    except OSError as error:
        raise DrumlineError(_what_failed(error, out)) from error


def _write(
    source: TextSource,
    folder: Path,
    tokenizer: Tokenizer,
    validation_fraction: float | None,
    shard_tokens: int,
    report: Callable[[Progress], None],
) -> Manifest:
    text_digest = new_digest()
    num_text_bytes = done_bytes = 0
    writer = ShardWriter(folder, dtype=dtype_for(tokenizer.vocab_size), eos=tokenizer.eos, shard_tokens=shard_tokens)
    try:
        for pieces in _batches(_without_empty(source)):
            for piece, tokens in zip(pieces, tokenizer.encode([piece.text for piece in pieces]), strict=True):
                writer.add(tokens)
                text = piece.text.encode()
                text_digest.update(text)
                num_text_bytes += len(text)
                done_bytes += piece.num_bytes
                if piece.ends_document:
                    writer.end_document()
                    text_digest.update(b"\xff")  # no text has this byte: documents' borders are part of the digest
            report(Progress("tokenizing", done_bytes, source.num_bytes, writer.num_tokens, writer.num_documents))
        shards = writer.close()
    except BaseException:
        writer.abort()
        raise
    if not writer.num_documents:
        raise DrumlineError(f"no text in {', '.join(source.names)}{_left_out(source.counts)}")
    return Manifest(
        dtype=dtype_for(tokenizer.vocab_size),
        num_tokens=writer.num_tokens,
        num_documents=writer.num_documents,
        validation_fraction=validation_fraction,
        tokenizer=TokenizerEntry(
            spec=tokenizer.spec,
            file=_store_tokenizer(folder, tokenizer),
            vocab_size=tokenizer.vocab_size,
            eos=tokenizer.eos,
        ),
        source=SourceEntry(
            names=source.names,
            num_bytes=num_text_bytes,
            xxh3_128=text_digest.hexdigest(),
            **dataclasses.asdict(source.counts),
        ),
        shards=shards,
    )


def _without_empty(source: TextSource) -> Iterator[Piece]:
    """Leaves out documents that have no text; keeps the bytes that they took for the progress."""
    begun = False
    skipped_bytes = 0
    for piece in source.pieces():
        if piece.ends_document and not begun and not piece.text.strip():
            source.counts.num_empty += 1
            skipped_bytes += piece.num_bytes
            continue
        yield dataclasses.replace(piece, num_bytes=piece.num_bytes + skipped_bytes)
        skipped_bytes = 0
        begun = not piece.ends_document


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece.text) + 64
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _store_tokenizer(folder: Path, tokenizer: Tokenizer) -> FileEntry | None:
    content = tokenizer.to_json()
    if content is None:
        return None
    data = content.encode()
    (folder / TOKENIZER_NAME).write_bytes(data)
    digest = new_digest()
    digest.update(data)
    return FileEntry(name=TOKENIZER_NAME, num_bytes=len(data), xxh3_128=digest.hexdigest())


def _check_free(out: Path, overwrite: bool) -> None:
    """Refuses to write over anything, except over a prepared folder when asked to."""
    if out.resolve() == Path.cwd():
        raise DrumlineError("--out is the folder that you are in: name one in it, such as --out prepared")
    if out.is_symlink() and not out.exists():
        raise DrumlineError(f"{out} is a link to nothing")
    if not _exists(out):
        return
    if not out.is_dir():
        raise DrumlineError(f"{out} exists and is not a folder: choose another --out")
    if (out / NAME).is_file():
        if not overwrite:
            raise DrumlineError(
                f"{out} is a prepared folder already: choose another --out, or replace it with --overwrite"
            )
    elif any(out.iterdir()):
        raise DrumlineError(f"{out} exists and holds something else: choose another --out")


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DrumlineError(f"cannot look at {path}: {error.strerror}") from error
    return True


def _left_out(counts: Counts) -> str:
    said = [(counts.num_skipped, "files or lines that are not text"), (counts.num_empty, "empty documents")]
    parts = [f"{what}: {number:,}" for number, what in said if number]
    return f" ({', '.join(parts)})" if parts else ""


def _what_failed(error: OSError, out: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left for {out}: nothing was kept; free some or choose another --out"
    where = error.filename if isinstance(error.filename, str | Path) else out
    return f"cannot prepare {out}: {where}: {error.strerror or error}"
