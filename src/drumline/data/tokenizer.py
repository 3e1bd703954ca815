"""Text to token numbers and back: bytes, a BPE trained on the spot, or any Hugging Face `tokenizer.json`.

A spec says which: `bytes`, `bpe:SIZE` (train one with SIZE entries on the text that is prepared), or a path. Special
tokens that stand in the text are text: only drumline itself writes an end-of-document token.
Sources: Sennrich et al. 2016, arXiv:1508.07909; the splitting pattern is Llama 3's (arXiv:2407.21783).
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from drumline.recipe.errors import DrumlineError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

EOS_TEXT = "<|end_of_text|>"
EOS_TEXTS = (
    EOS_TEXT,
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|im_end|>",
    "[SEP]",
)
SMALLEST_BPE = 257  # every byte and the end-of-document token
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer(Protocol):
    """What the room needs of a tokenizer.

    Attributes:
        spec: what the user asked for.
        vocab_size: one more than the largest token number.
        eos: the number of the end-of-document token.
    """

    spec: str
    vocab_size: int
    eos: int

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns each text's token numbers (uint32), without special tokens."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of token numbers."""
        ...

    def to_json(self) -> str | None:
        """Returns the content of a `tokenizer.json`; None for bytes, which need none."""
        ...


class ByteTokenizer:
    """UTF-8 bytes are the tokens, and 256 ends a document."""

    spec = "bytes"
    vocab_size = 257
    eos = 256

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns each text's bytes as uint32."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of bytes; U+FFFD where they are not UTF-8, nothing for the end of a document."""
        return np.asarray(tokens)[np.asarray(tokens) < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def to_json(self) -> None:
        """Returns None: there is nothing to store."""
        return


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        spec: what the user asked for.
        eos: the number of the end-of-document token.
    """

    def __init__(self, tokenizer: "Library", spec: str, eos: int):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # `<|end_of_text|>` in a text is those 15 characters
        self.spec = spec
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.eos = eos
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns each text's token numbers as uint32; several texts at once use several threads."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of token numbers, special tokens included."""
        return self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)

    def to_json(self) -> str:
        """Returns the content of a `tokenizer.json`."""
        return self._tokenizer.to_str(pretty=True)


def bpe_size(spec: str) -> int | None:
    """Reads the spec of a BPE.

    Args:
        spec: any tokenizer spec.

    Returns:
        SIZE of `bpe:SIZE`, None of another kind of spec.

    Raises:
        DrumlineError: SIZE is no number or too small.
    """
    kind, _, size = spec.partition(":")
    if kind != "bpe":
        return None
    if not size.isascii() or not size.isdigit() or int(size) < SMALLEST_BPE:
        raise DrumlineError(
            f"tokenizer {spec!r}: a BPE's size is a number from {SMALLEST_BPE} up (every byte and the end-of-document "
            "token), such as bpe:2048"
        )
    return int(size)


def train_bpe(size: int, texts: Iterable[str]) -> SubwordTokenizer:
    """Trains a byte-level BPE; the same texts give the same tokenizer.

    Args:
        size: entries of the vocabulary; fewer come out where the text is too small for as many merges.
        texts: text to count pairs in.

    Returns:
        The tokenizer.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return SubwordTokenizer(tokenizer, f"bpe:{size}", tokenizer.get_vocab()[EOS_TEXT])


def load_tokenizer(spec: str, eos: int | str | None = None) -> Tokenizer:
    """Loads the tokenizer of a spec that needs no training.

    Args:
        spec: `bytes`, a `tokenizer.json`, or a folder that has one.
        eos: the end-of-document token, number or text; None: from `tokenizer_config.json` or by its usual names.

    Returns:
        The tokenizer.

    Raises:
        DrumlineError: there is no such tokenizer, or it has no end-of-document token.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DrumlineError(
            f"no tokenizer {spec!r}: use `bytes`, `bpe:SIZE`, or the path of a Hugging Face tokenizer.json"
        )
    from tokenizers import Tokenizer as Library

    try:
        tokenizer = Library.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises a bare Exception
        raise DrumlineError(f"{path} is not a Hugging Face tokenizer.json: {error}") from error
    return SubwordTokenizer(tokenizer, spec, _find_eos(tokenizer, path, eos))


def _find_eos(tokenizer: "Library", path: Path, wanted: int | str | None) -> int:
    if isinstance(wanted, int):
        if tokenizer.id_to_token(wanted) is None:
            raise DrumlineError(f"{path} has no token number {wanted}")
        return wanted
    if wanted is not None:
        number = tokenizer.token_to_id(wanted)
        if number is None:
            raise DrumlineError(f"{path} has no token {wanted!r} to end a document with")
        return number
    for text in (_configured_eos(path.with_name("tokenizer_config.json")), *EOS_TEXTS):
        number = tokenizer.token_to_id(text) if text else None
        if number is not None:
            return number
    raise DrumlineError(f"{path} does not say which token ends a document: name it with --eos TOKEN")


def _configured_eos(path: Path) -> str | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return value.get("content") if isinstance(value, dict) else value
