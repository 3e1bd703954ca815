"""A source for tests."""

from collections.abc import Sequence

from drumline.data.text import Counts, in_pieces


class ListSource:
    """Documents that are held in a list."""

    def __init__(self, texts: Sequence[str]):
        self.names: tuple[str, ...] = ("a list",)
        self.num_bytes: int | None = sum(len(text.encode()) for text in texts)
        self.counts = Counts()
        self._texts = list(texts)

    def pieces(self):
        for text in self._texts:
            yield from in_pieces(text, len(text.encode()))

    def sample(self, num_bytes: int):
        return iter(self._texts)
