"""The manifest of a prepared data folder: what is in it, and the size and digest of every file.

A folder holds `manifest.json`, `tokenizer.json` (unless the tokenizer is `bytes`) and for each shard two files, both
little-endian: `tokens-N.bin`, uint16 or uint32 token numbers, each document's tokens followed by the end-of-document
token; and `documents-N.bin`, int64, where each document starts in the shard, and last the number of the shard's
tokens. A document lies in one shard.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from drumline.data.digest import digest_of
from drumline.recipe.errors import DrumlineError

FORMAT = "drumline-data"
VERSION = 1
NAME = "manifest.json"

Natural = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Part):
    """A file beside the manifest."""

    name: str
    num_bytes: Natural
    xxh3_128: str

    @model_validator(mode="after")
    def _is_a_plain_name(self) -> "FileEntry":
        if self.name in ("", ".", "..") or "/" in self.name or "\\" in self.name:
            raise ValueError(f"{self.name!r} is not the name of a file beside the manifest")
        return self


class Shard(_Part):
    """One pair of token and document files."""

    tokens: FileEntry
    documents: FileEntry
    num_tokens: Natural
    num_documents: Natural


class TokenizerEntry(_Part):
    """How text became tokens."""

    spec: str
    file: FileEntry | None
    vocab_size: Annotated[int, Field(ge=1)]
    eos: Natural


class SourceEntry(_Part):
    """Where the text came from."""

    names: tuple[str, ...]
    num_bytes: Natural = Field(description="UTF-8 bytes of text.")
    xxh3_128: str = Field(description="Digest of all text, document by document.")
    num_skipped: Natural = Field(0, description="Files or lines that were left out: not text.")
    num_empty: Natural = Field(0, description="Documents that were left out: no text.")
    num_replaced: Natural = Field(0, description="Documents in which invalid characters became U+FFFD.")


class Manifest(_Part):
    """All that a reader has to know about a prepared folder."""

    format: Literal["drumline-data"] = FORMAT
    version: Literal[1] = VERSION
    dtype: Literal["uint16", "uint32"]
    num_tokens: Natural
    num_documents: Natural
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    tokenizer: TokenizerEntry
    source: SourceEntry
    shards: tuple[Shard, ...]

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """Every file that the folder must have beside the manifest."""
        shards = tuple(entry for shard in self.shards for entry in (shard.documents, shard.tokens))
        return ((self.tokenizer.file,) if self.tokenizer.file else ()) + shards

    @property
    def digest(self) -> str:
        """The identity of the tokens: equal for two folders that hold the same tokens in the same documents."""
        entries = [entry.xxh3_128 for shard in self.shards for entry in (shard.documents, shard.tokens)]
        return digest_of(self.dtype, str(self.tokenizer.vocab_size), str(self.tokenizer.eos), *entries)


class DamagedManifestError(DrumlineError):
    """The manifest was drumline's and is no more what was written."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, with its own digest inside."""
    body = manifest.model_dump(mode="json")
    body["digest"] = _digest_of_body(body)
    (folder / NAME).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks a folder's manifest.

    Args:
        folder: a prepared folder.

    Returns:
        The manifest.

    Raises:
        DrumlineError: there is no such folder, it is not a prepared one, or its manifest is newer.
        DamagedManifestError: it is not what was written.
    """
    path = folder / NAME
    try:
        raw = path.read_bytes()
    except NotADirectoryError:
        raise DrumlineError(
            f"{folder} is a file, not a prepared data folder: `drumline data prepare {folder}` makes one of it"
        ) from None
    except FileNotFoundError:
        if not folder.exists():
            why = f"no data folder {folder}: make it by `drumline data prepare SOURCE --out {folder}`"
        else:
            why = (
                f"{folder} is not a prepared data folder (it has no {NAME}): "
                f"`drumline data prepare {folder}` makes one of its text"
            )
        raise DrumlineError(why) from None
    except OSError as error:
        raise DrumlineError(f"cannot read {path}: {error.strerror}") from error
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DamagedManifestError(f"{path} is damaged (not JSON: {error}): prepare the folder again") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise DrumlineError(f"{path} is not drumline's (its format is not {FORMAT!r}): is this another tool's folder?")
    if body.get("version") != VERSION:
        raise DrumlineError(
            f"{path} has format version {body.get('version')!r}, this drumline reads {VERSION}: "
            "prepare it again, or update"
        )
    if body.pop("digest", None) != _digest_of_body(body):
        raise DamagedManifestError(
            f"{path} is damaged or was edited (its digest does not match): prepare the folder again"
        )
    try:
        return Manifest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DamagedManifestError(f"{path} is damaged ({where}: {first['msg']}): prepare the folder again") from error


def _digest_of_body(body: dict) -> str:
    return digest_of(json.dumps(body, sort_keys=True, separators=(",", ":")))
