"""Writes token shards and their document indices with running digests, holding one shard's index in memory."""

from array import array
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from drumline.data.digest import new_digest
from drumline.data.manifest import FileEntry, Shard

SHARD_TOKENS = 1 << 28  # 0.5 GiB of uint16
BUFFER_BYTES = 1 << 20


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Returns the smallest unsigned type that holds every token number."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class ShardWriter:
    """Appends documents to shards in a folder.

    Args:
        folder: where the files go; exists.
        dtype: uint16 or uint32.
        eos: token that is put after each document.
        shard_tokens: a shard that has as many tokens is closed at the next document's end.
    """

    def __init__(self, folder: Path, *, dtype: str, eos: int, shard_tokens: int = SHARD_TOKENS):
        self._folder = folder
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._eos = np.array([eos], dtype=self._dtype)
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._digest = new_digest()
        self._starts = array("q", [0])
        self._num_tokens = 0
        self.num_tokens = 0
        self.num_documents = 0

    def add(self, tokens: np.ndarray) -> None:
        """Appends tokens to the document that is being written."""
        data = np.ascontiguousarray(tokens, dtype=self._dtype).tobytes()
        if self._file is None:
            self._file = (self._folder / self._name("tokens")).open("wb", buffering=BUFFER_BYTES)
        self._file.write(data)
        self._digest.update(data)
        self._num_tokens += len(tokens)
        self.num_tokens += len(tokens)

    def end_document(self) -> None:
        """Ends the document that is being written."""
        self.add(self._eos)
        self._starts.append(self._num_tokens)
        self.num_documents += 1
        if self._num_tokens >= self._shard_tokens:
            self._end_shard()

    def close(self) -> tuple[Shard, ...]:
        """Ends the last shard and returns all of them."""
        self._end_shard()
        return tuple(self._shards)

    def abort(self) -> None:
        """Closes the open file, whatever is in it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _name(self, kind: str) -> str:
        return f"{kind}-{len(self._shards):05d}.bin"

    def _end_shard(self) -> None:
        if self._file is None:
            return
        self._file.close()
        index = np.array(self._starts, dtype=np.int64).astype("<i8").tobytes()
        index_digest = new_digest()
        index_digest.update(index)
        (self._folder / self._name("documents")).write_bytes(index)
        self._shards.append(
            Shard(
                tokens=FileEntry(
                    name=self._name("tokens"),
                    num_bytes=self._num_tokens * self._dtype.itemsize,
                    xxh3_128=self._digest.hexdigest(),
                ),
                documents=FileEntry(
                    name=self._name("documents"), num_bytes=len(index), xxh3_128=index_digest.hexdigest()
                ),
                num_tokens=self._num_tokens,
                num_documents=len(self._starts) - 1,
            )
        )
        self._file, self._digest, self._starts, self._num_tokens = None, new_digest(), array("q", [0]), 0
