"""A mixture of sources by weight: which source a sample comes from is a pure function of its index.

Samples are dealt in periods. Within a period of P samples source s gives n_s of them, n_s / P being its share, and
its k-th stands at time (k + 1/2) / n_s: all samples of the period sorted by time. So every prefix of the stream holds
each source's share to within a few samples (a low-discrepancy order, as in weighted round-robin), every period holds
it exactly, and nothing is drawn.
"""

import json
import math
import shlex
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from drumline.recipe.errors import DrumlineError

MAX_PERIOD = 1 << 16  # a share is kept to 1 part in 65,536 when it is not a fraction with a smaller denominator


class Mixture:
    """Deals sample indices to sources.

    Args:
        weights: one positive weight a source; only their ratios matter.
    """

    def __init__(self, weights: Sequence[float]):
        counts_S = _counts(weights)
        self.period = int(sum(counts_S))
        self.counts_S = np.array(counts_S, dtype=np.int64)
        times = np.concatenate([(np.arange(count) + 0.5) / count for count in counts_S])
        sources = np.repeat(np.arange(len(counts_S)), counts_S)
        ranks = np.concatenate([np.arange(count) for count in counts_S])
        by_time = np.lexsort((sources, times))
        self._source_P, self._rank_P = sources[by_time], ranks[by_time]

    def locate(self, index_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns each sample's source and its number within that source.

        Args:
            index_N: int64 global sample indices >= 0.

        Returns:
            (source_N, number_N): int64; number counts 0, 1, 2, ... within a source, without gaps.
        """
        period_N, place_N = np.divmod(index_N, self.period)
        source_N = self._source_P[place_N]
        return source_N, period_N * self.counts_S[source_N] + self._rank_P[place_N]

    def samples_before(self, numbers_S: Sequence[int]) -> int:
        """Returns how many global samples are dealt before some source s gives more than numbers_S[s]."""
        first = [
            (number // count) * self.period + int(np.flatnonzero(self._source_P == source)[number % count])
            for source, (number, count) in enumerate(zip(numbers_S, self.counts_S.tolist(), strict=True))
        ]
        return min(first)


def _counts(weights: Sequence[float]) -> list[int]:
    """Returns each source's samples in one period: exact where a short period allows, else largest remainders."""
    if not weights or any(weight <= 0 for weight in weights):
        raise ValueError(f"a mixture needs positive weights, not {list(weights)}")
    exact = [Fraction(weight).limit_denominator(MAX_PERIOD) for weight in weights]
    if all(exact):
        shares = [weight / sum(exact) for weight in exact]
        period = math.lcm(*(share.denominator for share in shares))
        if period <= MAX_PERIOD:
            return [int(share * period) for share in shares]
    ideal = np.array(weights) / np.sum(weights) * MAX_PERIOD
    counts = np.maximum(1, np.floor(ideal)).astype(np.int64)
    for source in np.argsort(counts - ideal, kind="stable")[: max(0, MAX_PERIOD - int(counts.sum()))]:
        counts[source] += 1
    return counts.tolist()


def refuse_joined(path: str) -> None:
    """Refuses several paths that were written as one: with commas, or in brackets without quotes.

    Args:
        path: of a source, as the recipe has it.

    Raises:
        DrumlineError: no such folder exists, and it was meant as a mixture; says how one is written.
    """
    parts = [part.strip().strip("\"'") for part in path.strip().removeprefix("[").removesuffix("]").split(",")]
    parts = [part for part in parts if part]
    is_list = path.strip().startswith("[") or len(parts) > 1
    if not is_list or not parts or Path(path).expanduser().exists():
        return
    listed = shlex.quote(f"data.sources={json.dumps(parts)}")
    weights = (f"{{path={json.dumps(part)}, weight={3 if index == 0 else 1}}}" for index, part in enumerate(parts))
    weighted = shlex.quote(f"data.sources=[{', '.join(weights)}]")
    raise DrumlineError(
        f"data.sources = {path} is read as the path of one folder, which does not exist; a mixture is a list of paths, "
        f"in quotes\n  try: {listed}\n  or, by weight: {weighted}"
    )
