"""Pieces of text: a document is one or more of them, so that none has to be in memory whole."""

from collections.abc import Iterator
from dataclasses import dataclass

PIECE_CHARS = 1 << 18


@dataclass(frozen=True)
class Piece:
    """A part of a document.

    Args:
        text: the characters.
        ends_document: this is the document's last piece.
        num_bytes: bytes of the source that it accounts for.
    """

    text: str
    ends_document: bool
    num_bytes: int


def in_pieces(text: str, num_bytes: int) -> Iterator[Piece]:
    """Cuts one document's text at line ends into pieces that a tokenizer takes at a time.

    Args:
        text: the whole document.
        num_bytes: bytes of the source that it accounts for.

    Yields:
        Its pieces; the last one ends the document and carries num_bytes.
    """
    begin = 0
    while len(text) - begin > PIECE_CHARS:
        end = text.rfind("\n", begin, begin + PIECE_CHARS) + 1 or begin + PIECE_CHARS
        end = end if end > begin else begin + PIECE_CHARS
        yield Piece(text[begin:end], False, 0)
        begin = end
    yield Piece(text[begin:], True, num_bytes)
