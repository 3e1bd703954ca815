"""A prepared data folder, opened for reading: memory-mapped tokens and where each document starts.

Opening checks the manifest, the size of every file and the digest of every document index (a few MB); a run also
checks the tokens of its first shards, and `verify` reads all of them.
Letters: N documents, S tokens of a shard.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from drumline.data.digest import digest_of_file
from drumline.data.manifest import DamagedManifestError, FileEntry, Manifest, Shard, read_manifest
from drumline.data.tokenizer import Tokenizer, load_tokenizer
from drumline.recipe.errors import CheckFailed, DrumlineError

ITEM_BYTES = {"uint16": 2, "uint32": 4}
CHECKED_BYTES = 1 << 28  # of tokens, when a run opens a folder: a tenth of a second where they are in memory


class Corpus:
    """The tokens of a prepared folder.

    Args:
        folder: what `drumline data prepare` wrote.

    Raises:
        DrumlineError: the folder is missing, foreign or damaged; says which file.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        for entry in self.manifest.files:
            _check_size(folder, entry)
        self._check_counts()
        self.tokens: tuple[np.ndarray, ...] = tuple(self._map(shard) for shard in self.manifest.shards)
        self.starts: tuple[np.ndarray, ...] = tuple(self._index(shard) for shard in self.manifest.shards)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self.manifest.num_documents

    @property
    def lengths(self) -> np.ndarray:
        """int64 number of tokens of each document, its end-of-document token included."""
        return np.concatenate([np.diff(starts) for starts in self.starts] or [np.empty(0, np.int64)])

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer that made the tokens.

        Returns:
            The tokenizer.

        Raises:
            DrumlineError: its file is damaged.
        """
        entry = self.manifest.tokenizer
        if entry.file is None:
            return load_tokenizer(entry.spec)
        path = self.folder / entry.file.name
        _check_digest(path, entry.file)
        return load_tokenizer(str(path), eos=entry.eos)

    def check_tokens(self) -> None:
        """Compares token shards with their digests, as many as are read in a moment: all of a small folder.

        Raises:
            DrumlineError: a shard is not as it was written; says which.
        """
        left = CHECKED_BYTES
        for shard in self.manifest.shards:
            left -= shard.tokens.num_bytes
            if left < 0:
                return
            _check_digest(self.folder / shard.tokens.name, shard.tokens)

    def document(self, number: int) -> np.ndarray:
        """Looks one document up.

        Args:
            number: which, from 0.

        Returns:
            Its tokens, without the end-of-document token.

        Raises:
            DrumlineError: there is no such document.
        """
        if not 0 <= number < self.num_documents:
            raise DrumlineError(
                f"no document {number} in {self.folder}: they are numbered 0 to {self.num_documents - 1}"
            )
        for tokens_S, starts in zip(self.tokens, self.starts, strict=True):
            if number < len(starts) - 1:
                return np.array(tokens_S[starts[number] : starts[number + 1] - 1])
            number -= len(starts) - 1
        raise AssertionError("the manifest's counts were checked when the folder was opened")

    def _check_counts(self) -> None:
        manifest = self.manifest
        itemsize = ITEM_BYTES[manifest.dtype]
        for shard in manifest.shards:
            fits = shard.tokens.num_bytes == shard.num_tokens * itemsize
            if not fits or shard.documents.num_bytes != (shard.num_documents + 1) * 8:
                raise DrumlineError(f"{self.folder}: the manifest's counts and sizes of {shard.tokens.name} disagree")
        num_tokens = sum(shard.num_tokens for shard in manifest.shards)
        num_documents = sum(shard.num_documents for shard in manifest.shards)
        if (num_tokens, num_documents) != (manifest.num_tokens, manifest.num_documents):
            raise DrumlineError(f"{self.folder}: the manifest's totals are not the sums over its shards")

    def _map(self, shard: Shard) -> np.ndarray:
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        if not shard.num_tokens:
            return np.empty(0, dtype)
        try:
            mapped = np.memmap(self.folder / shard.tokens.name, dtype=dtype, mode="r")
        except OSError as error:
            raise DrumlineError(f"cannot map {self.folder / shard.tokens.name}: {error.strerror}") from error
        return np.asarray(mapped)  # the same memory; slicing a plain array is several times faster

    def _index(self, shard: Shard) -> np.ndarray:
        path = self.folder / shard.documents.name
        _check_digest(path, shard.documents)
        starts = np.fromfile(path, dtype="<i8")
        if starts[0] != 0 or starts[-1] != shard.num_tokens or (np.diff(starts) < 1).any():
            raise DrumlineError(f"{path} does not index {shard.tokens.name}: prepare the folder again")
        return starts


class DamagedFolder(CheckFailed):
    """A prepared folder is not as it was written.

    Args:
        faults: one message a file.
    """

    def __init__(self, faults: Sequence[str]):
        self.faults = tuple(faults)
        super().__init__("\n".join(faults))


def verify(folder: Path, report: Callable[[int, int], None] = lambda done, total: None) -> Manifest:
    """Reads every file of a prepared folder and compares it with the manifest.

    Args:
        folder: what `drumline data prepare` wrote.
        report: called with the bytes that are checked and the bytes in all.

    Returns:
        The manifest, every file of which is as it was written.

    Raises:
        DamagedFolder: at least one file is missing or differs; names all of them.
        DrumlineError: this is not a prepared folder at all.
    """
    try:
        manifest = read_manifest(folder)
    except DamagedManifestError as error:
        raise DamagedFolder([str(error)]) from error
    faults = []
    done_bytes, total_bytes = 0, sum(entry.num_bytes for entry in manifest.files)
    for entry in manifest.files:
        try:
            _check_size(folder, entry)
            base = done_bytes
            _check_digest(folder / entry.name, entry, lambda done, base=base: report(base + done, total_bytes))
        except DrumlineError as error:
            faults.append(str(error))
        done_bytes += entry.num_bytes
        report(done_bytes, total_bytes)
    if not faults:
        try:
            Corpus(folder)
        except DrumlineError as error:
            faults.append(str(error))
    if faults:
        raise DamagedFolder(faults)
    return manifest


def _check_size(folder: Path, entry: FileEntry) -> None:
    path = folder / entry.name
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        raise DrumlineError(f"{path} is missing: prepare the folder again, or copy it whole") from None
    except OSError as error:
        raise DrumlineError(f"cannot read {path}: {error.strerror}") from error
    if num_bytes != entry.num_bytes:
        raise DrumlineError(f"{path} is damaged: it has {num_bytes:,} bytes, the manifest says {entry.num_bytes:,}")


def _check_digest(path: Path, entry: FileEntry, report: Callable[[int], None] = lambda done: None) -> None:
    try:
        digest = digest_of_file(path, report)
    except OSError as error:
        raise DrumlineError(f"cannot read {path}: {error.strerror}") from error
    if digest != entry.xxh3_128:
        raise DrumlineError(f"{path} is damaged: its digest is {digest}, the manifest says {entry.xxh3_128}")
