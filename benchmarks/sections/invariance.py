"""What batch-invariant operators cost beside torch's: forward and backward, at 64, 512 and 2,048 tokens.

torch's operators may give a row other bits in another batch; drumline's may not. Both compute the same on the same
inputs in alternating rounds with one thread, so that only the operators differ.
"""

import math

import torch
from harness import Bar

from drumline.numerics.invariant.probe import NAMES, cost
from sections.section import Section

BAR = 1.1  # times torch's time, forward and backward
ROWS = {False: (64, 512, 2048), True: (64, 512)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure(quick: bool) -> Section:
    """Measures; `quick` takes fewer sizes and rounds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = {
            f"{name} {dtype}": {rows: cost(name, DTYPES[dtype], 3 if quick else 9, rows) for rows in ROWS[quick]}
            for name in NAMES
            if name != "elementwise"
            for dtype in DTYPES
        }
    finally:
        torch.set_num_threads(before)
    bars, details, lines = [], {}, []
    for name, by_rows in figures.items():
        known = {rows: price for rows, price in by_rows.items() if price is not None}
        # A speed of at least 1 / 1.1 of torch's: bars are lower bounds.
        mean = math.prod(price.ratio for price in known.values()) ** (1 / len(known))
        bars.append(Bar(f"{name}: invariant operator's speed over torch's", 1 / mean, 1 / BAR))
        details[name] = {rows: vars(price) for rows, price in known.items()}
        cells = "  ".join(f"{rows:,} tokens {price.ratio:5.2f}x" for rows, price in known.items())
        lines.append(f"  {name:20} {cells}")
    head = "(invariance) time of batch-invariant operators over torch's, forward and backward, one thread"
    return Section(bars, details, "\n".join([head, *lines]))
