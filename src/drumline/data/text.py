"""Pieces of text: a document is one or more of them, so that none has to be in memory whole."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

PIECE_CHARS = 1 << 18

Invalid = Literal["auto", "error", "skip", "replace"]


@dataclass(frozen=True)
class Piece:
    """A part of a document.

    Attributes:
        text: the characters.
        ends_document: this is the document's last piece.
        num_bytes: bytes of the source that it accounts for.
    """

    text: str
    ends_document: bool
    num_bytes: int


@dataclass
class Counts:
    """What a source left out or changed while it was read."""

    num_skipped: int = 0
    num_empty: int = 0
    num_replaced: int = 0


def in_pieces(text: str, num_bytes: int, *, ends_document: bool = True) -> Iterator[Piece]:
    """Cuts text at line ends into pieces that a tokenizer takes at a time.

    Args:
        text: a document, or a part of one.
        num_bytes: bytes of the source that it accounts for.
        ends_document: the document ends with the text.

    Yields:
        Its pieces; the last one carries num_bytes.
    """
    begin = 0
    while len(text) - begin > PIECE_CHARS:
        end = text.rfind("\n", begin, begin + PIECE_CHARS) + 1 or begin + PIECE_CHARS
        yield Piece(text[begin:end], False, 0)
        begin = end
    yield Piece(text[begin:], ends_document, num_bytes)


def without_surrogates(text: str, counts: Counts) -> str:
    r"""Returns text that can be encoded: an unpaired surrogate (JSON has "\ud800") becomes U+FFFD and is counted."""
    try:
        text.encode()
    except UnicodeEncodeError:
        counts.num_replaced += 1
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
