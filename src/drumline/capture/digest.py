"""What is kept of a tensor in place of its elements: a hash of its bits, and sums. Both add up over parts.

So what ranks kept of their parts gives that of the logical tensor, in any layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drumline.numerics import kernels

_WORD = 1 << 64


@dataclass(frozen=True)
class Statistics:
    """Sums over elements; those that are not finite are counted, and left out of all else.

    Attributes:
        count: elements.
        num_nan: that are not a number.
        num_infinite: of either sign.
        num_zero: of either sign.
        smallest: inf where no element is finite.
        largest: -inf where none is.
        total: the sum, fp64.
        squares: the sum of squares, fp64.
    """

    count: float
    num_nan: float
    num_infinite: float
    num_zero: float
    smallest: float
    largest: float
    total: float
    squares: float

    @property
    def rms(self) -> float:
        """Root of the mean square of the finite elements."""
        return math.sqrt(self.squares / self.num_finite) if self.num_finite else 0.0

    @property
    def mean(self) -> float:
        """Of the finite elements."""
        return self.total / self.num_finite if self.num_finite else 0.0

    @property
    def largest_magnitude(self) -> float:
        """The largest absolute value of a finite element."""
        return max(abs(self.smallest), abs(self.largest)) if self.num_finite else 0.0

    @property
    def num_finite(self) -> float:
        """Elements that are finite."""
        return self.count - self.num_nan - self.num_infinite


@dataclass(frozen=True)
class Digest:
    """A part without its elements.

    Attributes:
        hash: as `numerics.kernels.hash_bits`.
        statistics: None where only the hash was asked for.
    """

    hash: int
    statistics: Statistics | None = None


def digest(tensor: torch.Tensor, starts_R: torch.Tensor, *, with_statistics: bool = False) -> Digest:
    """Digests a part.

    Args:
        tensor: the part.
        starts_R: where its runs begin in the whole tensor, as for `hash_bits`.
        with_statistics: more than the hash.

    Returns:
        The digest.
    """
    return Digest(kernels.hash_bits(tensor, starts_R), statistics(tensor) if with_statistics else None)


def statistics(tensor: torch.Tensor) -> Statistics:
    """Sums over a tensor's elements, in fp64."""
    x_N = tensor.detach().flatten().double()
    is_finite = torch.isfinite(x_N)
    if not bool(is_finite.all()):
        num_nan, count = int(torch.isnan(x_N).sum()), len(x_N)
        x_N = x_N[is_finite]
        num_infinite = count - num_nan - len(x_N)
    else:
        num_nan, num_infinite, count = 0, 0, len(x_N)
    low, high = (float(x) for x in x_N.aminmax()) if len(x_N) else (math.inf, -math.inf)
    zeros = int((x_N == 0).sum())
    return Statistics(count, num_nan, num_infinite, zeros, low, high, float(x_N.sum()), float(x_N @ x_N))


def joined(digests: Sequence[Digest]) -> Digest:
    """The digest of a tensor from those of parts that share no element.

    Args:
        digests: at least one.

    Returns:
        Their sum; without statistics where one has none.
    """
    found = [each.statistics for each in digests if each.statistics is not None]
    total = sum(each.hash for each in digests) % _WORD
    if len(found) < len(digests):
        return Digest(total)
    added = {name: sum(getattr(each, name) for each in found) for name in ("count", "num_nan", "num_infinite")}
    return Digest(
        total,
        Statistics(
            **added,
            num_zero=sum(each.num_zero for each in found),
            smallest=min(each.smallest for each in found),
            largest=max(each.largest for each in found),
            total=math.fsum(each.total for each in found),
            squares=math.fsum(each.squares for each in found),
        ),
    )


def starts_of_box(shape: Sequence[int], offsets: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Where the runs of a box begin in the whole tensor.

    Args:
        shape: of the whole tensor.
        offsets: of the box.
        size: of the box.

    Returns:
        int64 [R]; a run is as long as neighbours in the box are neighbours in the whole.
    """
    whole_from = len(shape)
    while whole_from > 0 and size[whole_from - 1] == shape[whole_from - 1]:
        whole_from -= 1
    outer = max(0, whole_from - 1)  # dims before this one are walked through, one run each
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts = torch.tensor([sum(at * stride for at, stride in zip(offsets, strides, strict=True))], dtype=torch.int64)
    for dim in range(outer):
        starts = (starts[:, None] + torch.arange(size[dim]) * strides[dim]).flatten()
    return starts


def starts_of_rows(rows_N: torch.Tensor, width: int) -> torch.Tensor:
    """Where the runs of rows begin in the whole tensor; neighbouring rows make one run, where all of them are.

    Args:
        rows_N: int64, which rows.
        width: elements of a row.

    Returns:
        int64 [R].
    """
    if len(rows_N) and bool((rows_N[1:] - rows_N[:-1] == 1).all()):
        return rows_N[:1] * width
    return rows_N * width
