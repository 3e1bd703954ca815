"""`drumline data`: turn text into token shards, and look into them."""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from drumline.recipe.errors import DrumlineError

if TYPE_CHECKING:
    from drumline.data.corpus import Corpus
    from drumline.data.manifest import Manifest

data = typer.Typer(help="Turn text into token shards, and look into them.", rich_markup_mode=None, no_args_is_help=True)

SAMPLE_CHARS = 400
INTERRUPTED = 130

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A prepared folder.")]


@data.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files, folders or patterns of text, JSON lines (.jsonl, .ndjson, .json) or Parquet, also .gz; "
            "hf:NAME or the folder of a saved Hugging Face dataset; or stdlib.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The folder to make.", show_default="data/NAME")] = None,
    tokenizer: Annotated[
        str, typer.Option(help="bytes, bpe:SIZE (trained on the source), or a Hugging Face tokenizer.json.")
    ] = "bpe:2048",
    eos: Annotated[str | None, typer.Option(help="Token that ends a document, if the tokenizer does not say.")] = None,
    field: Annotated[str, typer.Option(help="Field of JSON lines, or column, that holds the text.")] = "text",
    documents: Annotated[
        Literal["auto", "file", "page", "line", "paragraph"],
        typer.Option(
            help="What a document of a text file is; a page has about 64 KiB. auto: file; page if alone or large."
        ),
    ] = "auto",
    invalid: Annotated[
        Literal["auto", "error", "skip", "replace"],
        typer.Option(help="What to do with what is not UTF-8 text. auto: skip files that a folder or pattern found."),
    ] = "auto",
    validation_fraction: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=0.99, help="Share of documents kept for validation in every run.", show_default="the recipe's"
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a Hugging Face dataset.")] = "train",
    config: Annotated[str | None, typer.Option(help="Configuration of a Hugging Face dataset.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a prepared folder that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Turn text into a folder of token shards that training reads. It appears whole or not at all."""
    from drumline.cli.progress import Meter
    from drumline.data.prepare import prepare as prepare_folder
    from drumline.data.sources import open_source

    folder = out or Path("data") / _name(sources[0])
    source = open_source(sources, field=field, documents=documents, invalid=invalid, split=split, config=config)
    meter = Meter("preparing", "text")
    try:
        with meter:
            manifest = prepare_folder(
                source,
                folder,
                tokenizer=tokenizer,
                eos=eos,
                validation_fraction=validation_fraction,
                overwrite=overwrite,
                report=lambda now: meter.show(
                    now.stage, now.done_bytes, now.total_bytes, f"{now.num_tokens:,} tokens" if now.num_tokens else ""
                ),
            )
    except KeyboardInterrupt:
        typer.echo(f"interrupted: nothing was kept in {folder}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        _print_json({"folder": str(folder), **_facts(manifest), "seconds": round(meter.seconds, 3)})
        return
    rate = manifest.source.num_bytes / 1e6 / max(meter.seconds, 1e-9)
    typer.echo(
        f"{folder}: {manifest.num_tokens:,} tokens in {_counted(manifest.num_documents, 'document')} "
        f"({manifest.source.num_bytes / 1e6:,.1f} MB of text, {meter.seconds:.1f} s, {rate:.1f} MB/s)"
    )
    for number, what in (
        (manifest.source.num_skipped, "not text, left out (files or lines)"),
        (manifest.source.num_empty, "empty, left out (documents)"),
        (manifest.source.num_replaced, "invalid characters, now U+FFFD (files or documents)"),
    ):
        if number:
            typer.echo(f"  {what}: {number:,}")
    typer.echo(f"vocabulary {manifest.tokenizer.vocab_size:,} ({manifest.tokenizer.spec}); train on it with")
    without = "" if _has_validation(manifest) else " run.validation_batches=0"
    typer.echo(f"  drumline train RECIPE data.sources={shlex.quote(str(folder))}{without}")
    if without:
        typer.echo(f"  ({_why_no_validation(manifest)})")


@data.command()
def inspect(
    folder: Folder,
    document: Annotated[int | None, typer.Option(help="Print this document's text, whole.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what is in a prepared folder: documents, tokens, lengths, a sample of the text."""
    from drumline.data.corpus import Corpus

    corpus = Corpus(folder)
    tokenizer = corpus.tokenizer()
    if document is not None:
        tokens = corpus.document(document)
        text = tokenizer.decode(tokens)
        if as_json:
            _print_json({"folder": str(folder), "document": document, "num_tokens": len(tokens), "text": text})
        else:
            sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    lengths = _lengths(corpus)
    sample = tokenizer.decode(corpus.document(0)[:SAMPLE_CHARS])[:SAMPLE_CHARS]
    if as_json:
        _print_json({"folder": str(folder), **_facts(corpus.manifest), "document_tokens": lengths, "sample": sample})
        return
    manifest = corpus.manifest
    kept = manifest.validation_fraction
    rows = [
        ("source", ", ".join(manifest.source.names)),
        ("text", f"{manifest.source.num_bytes:,} bytes"),
        ("documents", f"{manifest.num_documents:,}"),
        ("tokens", f"{manifest.num_tokens:,} ({manifest.source.num_bytes / manifest.num_tokens:.2f} bytes each)"),
        ("in a document", ", ".join(f"{name} {value:,}" for name, value in lengths.items()) + " tokens"),
        ("tokenizer", f"{manifest.tokenizer.spec}, {manifest.tokenizer.vocab_size:,} entries"),
        ("validation", "as the recipe says" if kept is None else f"{kept:g} of the documents, in every run"),
        ("shards", f"{len(manifest.shards)} of {manifest.dtype}, {sum(e.num_bytes for e in manifest.files):,} bytes"),
        ("digest", manifest.digest),
    ]
    for name, value in rows:
        typer.echo(f"{name:<14} {value}")
    typer.echo("\nThe beginning of document 0:")
    typer.echo("\n".join(f"  {line}" for line in sample.splitlines()))


@data.command()
def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Read every file of a prepared folder and compare it with its digest; exit 1 where one differs."""
    from drumline.cli.progress import Meter
    from drumline.data.corpus import DamagedFolder
    from drumline.data.corpus import verify as verify_folder

    faults: tuple[str, ...] = ()
    num_bytes = 0
    try:
        with Meter("verifying", "files") as meter:

            def report(done_bytes: int, total_bytes: int) -> None:
                nonlocal num_bytes
                num_bytes = done_bytes
                meter.show("verifying", done_bytes, total_bytes)

            verify_folder(folder, report)
    except DamagedFolder as error:
        if not as_json:
            raise
        faults = error.faults
    if as_json:
        _print_json({"folder": str(folder), "holds": not faults, "faults": list(faults), "num_bytes": num_bytes})
        raise typer.Exit(1 if faults else 0)
    typer.echo(f"{folder}: every file is as it was written ({num_bytes:,} bytes)")


def _name(spec: str) -> str:
    """Names the default folder after the first source."""
    name = Path(spec.removeprefix("hf:")).name.split(".")[0]
    if not name or any(character in name for character in "*?[]"):
        raise DrumlineError(f"the folder cannot be named after {spec!r}: name it with --out")
    return name


def _has_validation(manifest: "Manifest") -> bool:
    from drumline.data.stream import validation_documents
    from drumline.recipe.sections import Data

    own = manifest.validation_fraction
    return bool(validation_documents(manifest.num_documents, Data().validation_fraction if own is None else own).any())


def _why_no_validation(manifest: "Manifest") -> str:
    if manifest.validation_fraction == 0:
        return "no document is kept for validation, as --validation-fraction 0 says"
    return (
        "a single document leaves none for validation; more and smaller documents do: --documents page, paragraph or "
        "line, with --overwrite"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _facts(manifest: "Manifest") -> dict[str, Any]:
    return {
        "num_tokens": manifest.num_tokens,
        "num_documents": manifest.num_documents,
        "num_text_bytes": manifest.source.num_bytes,
        "num_skipped": manifest.source.num_skipped,
        "num_empty": manifest.source.num_empty,
        "num_replaced": manifest.source.num_replaced,
        "text_xxh3_128": manifest.source.xxh3_128,
        "sources": list(manifest.source.names),
        "tokenizer": manifest.tokenizer.spec,
        "vocab_size": manifest.tokenizer.vocab_size,
        "eos": manifest.tokenizer.eos,
        "dtype": manifest.dtype,
        "num_shards": len(manifest.shards),
        "validation_fraction": manifest.validation_fraction,
        "digest": manifest.digest,
    }


def _lengths(corpus: "Corpus") -> dict[str, int]:
    import numpy as np

    lengths = np.sort(corpus.lengths)
    return {"shortest": int(lengths[0]), "median": int(lengths[len(lengths) // 2]), "longest": int(lengths[-1])}


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False))
