"""The built-in source: the Python files of the running interpreter's standard library, tens of MB of real text.

It is prepared once and cached under the digest of its text and of how it is tokenized, so another Python or another
tokenizer gets a folder of its own.
"""

import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

from drumline.data.corpus import Corpus
from drumline.data.digest import digest_of
from drumline.data.folder import locked
from drumline.data.prepare import build
from drumline.data.text import Counts, Piece, in_pieces
from drumline.data.tokenizer import bpe_size, load_tokenizer
from drumline.recipe.errors import DrumlineError

NAME = "stdlib"
LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__"})
RECIPE_OF_CACHE = "2"  # changes when the way from text to tokens does


class StdlibSource:
    """The text of the standard library, a file a document, in the order of their names."""

    names: tuple[str, ...] = (NAME,)

    def __init__(self, root: Path | None = None):
        self.counts = Counts()
        self._root = root or Path(sysconfig.get_path("stdlib"))
        self._texts = list(self._read())
        self.num_bytes: int | None = sum(num_bytes for _, num_bytes in self._texts)
        if not self._texts:
            raise DrumlineError(
                f"the standard library in {self._root} has no Python files to train on: prepare a source of your own"
            )

    @property
    def digest(self) -> str:
        """Digest of all of the text, file by file."""
        return digest_of(*(text for text, _ in self._texts))

    def pieces(self) -> Iterator[Piece]:
        """Yields every file as a document."""
        for text, num_bytes in self._texts:
            yield from in_pieces(text, num_bytes)

    def sample(self, num_bytes: int) -> Iterator[str]:
        """Yields every n-th file, about num_bytes in all."""
        every = max(1, (self.num_bytes or 0) // num_bytes)
        return (text for text, _ in self._texts[::every])

    def _read(self) -> Iterator[tuple[str, int]]:
        paths = [
            path for path in self._root.rglob("*.py") if not LEFT_OUT.intersection(path.relative_to(self._root).parts)
        ]
        for path in sorted(paths, key=lambda path: path.relative_to(self._root).as_posix()):
            try:
                data = path.read_bytes()
                yield data.decode("utf-8"), len(data)
            except (OSError, UnicodeDecodeError):  # the test suite has files that are wrong on purpose
                self.counts.num_skipped += 1


def cached(cache_dir: str, tokenizer: str, notify: Callable[[str], None]) -> Corpus:
    """Opens the built-in source, preparing it where no process has yet.

    Args:
        cache_dir: where it is kept; empty: `~/.cache/drumline`.
        tokenizer: a spec.
        notify: called with a line for the user when something takes time.

    Returns:
        The opened folder.

    Raises:
        DrumlineError: the cache cannot be written, or the tokenizer does not exist.
    """
    source = StdlibSource()
    out = _cache_folder(cache_dir) / f"{NAME}-{_key(source, tokenizer)}"
    found = _open(out)
    if found:
        return found
    try:
        with locked(out, lambda: notify(f"waiting for another process that prepares {out}")):
            found = _open(out)
            if found:
                return found
            began = time.monotonic()
            notify(f"preparing the built-in source, once: {(source.num_bytes or 0) / 1e6:.1f} MB of text in {out}")
            manifest = build(source, out, tokenizer=tokenizer, overwrite=True)
            notify(f"prepared {manifest.num_tokens:,} tokens in {time.monotonic() - began:.1f} s")
    except DrumlineError as error:
        raise DrumlineError(f"{error}\n  data.cache_dir=FOLDER keeps the built-in source elsewhere") from error
    return Corpus(out)


def _cache_folder(cache_dir: str) -> Path:
    return Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "drumline"


def _key(source: StdlibSource, tokenizer: str) -> str:
    """Names a cache folder by all that decides which tokens are in it."""
    content = "" if bpe_size(tokenizer) is not None else load_tokenizer(tokenizer).to_json() or ""
    kind = tokenizer if bpe_size(tokenizer) is not None else "given"
    return digest_of(RECIPE_OF_CACHE, version("tokenizers"), source.digest, kind, content)[:16]


def _open(folder: Path) -> Corpus | None:
    """Opens a cached folder; None where there is none, or a damaged one, which is then made again."""
    if not folder.exists():
        return None
    try:
        corpus = Corpus(folder)
        corpus.check_tokens()
        return corpus
    except DrumlineError:
        return None
