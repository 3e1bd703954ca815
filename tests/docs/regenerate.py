"""Writes the real output of every command into the documentation: `make docs`.

python -m tests.docs.regenerate [--quick] [FILE...]     (--quick leaves out blocks that are marked slow)
"""

import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import DOCUMENTS, read_blocks, run_block


def regenerate(document: Path, folder: Path, *, with_slow: bool) -> bool:
    """Runs a document's blocks and writes their output; gives whether the document changed."""
    before = document.read_text(encoding="utf-8")
    blocks = [block for block in read_blocks(before) if block.is_run and (with_slow or not block.is_slow)]
    made = [(block, run_block(block, folder)) for block in blocks]
    text = before
    for block, body in reversed(made):
        text = text[: block.start] + body + text[block.start + len(block.body) :]
    document.write_text(text, encoding="utf-8")
    return text != before


def main() -> None:
    arguments = sys.argv[1:]
    with_slow = "--quick" not in arguments
    for document in [Path(name) for name in arguments if name != "--quick"] or DOCUMENTS:
        with tempfile.TemporaryDirectory() as folder:
            is_changed = regenerate(document, Path(folder), with_slow=with_slow)
        print(f"{document}: {'changed' if is_changed else 'unchanged'}", flush=True)


if __name__ == "__main__":
    main()
