"""How far two tensors are apart, by several measures at once, in pieces that fit a cache.

    relative Frobenius   |a - b| / |a|, Euclidean over all elements
    ulp                  how many numbers of the coarser dtype lie between two elements, counted through zero
    slope                <a, b> / <a, a> - 1: b is (1 + slope) a, on the whole; a sum that was taken twice has 1
    worst row, column    where |a - b| / |a| over one row is largest; a row is an index of the first dim
Elements that are not a number in either are left out of sums, and counted.

R rows, C columns: all dims but the first as one.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from drumline.capture.parts import bits_of, same_bits

_PIECE = 1 << 15
_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """What two tensors of one shape differ in; all zero where their bits are equal.

    Attributes:
        num_elements: of each.
        num_unequal: elements whose values differ; not-a-numbers equal one another.
        max_ulp: largest distance in units of the last place; None for integers.
        relative: relative Frobenius; inf where a is zero and b is not.
        max_abs: largest difference of two elements.
        at: its index.
        worst_row: index and relative difference of the row that is farthest off.
        worst_column: the same of a column.
        slope: bias of the slope.
        num_nan: not-a-numbers in a, in b, and in one of them only.
    """

    num_elements: int
    num_unequal: int = 0
    max_ulp: int | None = 0
    relative: float = 0.0
    max_abs: float = 0.0
    at: tuple[int, ...] = ()
    worst_row: tuple[int, float] = (0, 0.0)
    worst_column: tuple[int, float] = (0, 0.0)
    slope: float = 0.0
    num_nan: tuple[int, int, int] = (0, 0, 0)


def difference(a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Compares two tensors.

    Args:
        a: taken for what is right.
        b: of the same shape; its dtype may be another.

    Returns:
        The difference.
    """
    if same_bits(a, b) and not (a.is_floating_point() and bool(torch.isnan(a).any())):
        return Difference(a.numel())
    sums = _Sums(a)
    a_RC, b_RC = _as_rows(a), _as_rows(b)
    rows = max(1, _PIECE // max(1, a_RC.shape[1]))
    for at in range(0, len(a_RC), rows):
        sums.add(at, a_RC[at : at + rows], b_RC[at : at + rows])
    return sums.difference(a)


class _Sums:
    """What is summed up piece by piece."""

    def __init__(self, a: torch.Tensor):
        num_columns = _as_rows(a).shape[1]
        self._unequal = self._nan_a = self._nan_b = self._nan_one = 0
        self._ulp = 0
        self._max_abs, self._at = -1.0, 0
        self._squares = self._dot = self._error = 0.0
        self._row = (0, -1.0)
        self._error_C = torch.zeros(num_columns, dtype=torch.float64)
        self._squares_C = torch.zeros(num_columns, dtype=torch.float64)

    def add(self, at: int, a_RC: torch.Tensor, b_RC: torch.Tensor) -> None:
        x, y = a_RC.double(), b_RC.double()
        nan_x, nan_y = torch.isnan(x), torch.isnan(y)
        any_nan = nan_x | nan_y
        if bool(any_nan.any()):
            self._nan_a += int(nan_x.sum())
            self._nan_b += int(nan_y.sum())
            num_one = int((nan_x ^ nan_y).sum())
            self._nan_one += num_one
            self._unequal += num_one
            a_RC, b_RC = (z.masked_fill(any_nan, 0) for z in (a_RC, b_RC))
            x, y = x.masked_fill(any_nan, 0.0), y.masked_fill(any_nan, 0.0)
        gap = (x - y).masked_fill_(x == y, 0.0)  # equal infinities are not apart
        magnitude = gap.abs()
        place = int(magnitude.argmax())
        largest = float(magnitude.flatten()[place])
        if largest > self._max_abs:
            self._max_abs, self._at = largest, at * a_RC.shape[1] + place
        self._unequal += int(torch.count_nonzero(gap))
        if a_RC.is_floating_point():
            self._ulp = max(self._ulp, _largest_ulp(a_RC, b_RC))
        gap_RC, squares_RC = gap.square_(), x * x
        error_R, squares_R = gap_RC.sum(1), squares_RC.sum(1)
        self._error += float(error_R.sum())
        self._squares += float(squares_R.sum())
        self._dot += float((x * y).sum())
        self._error_C += gap_RC.sum(0)
        self._squares_C += squares_RC.sum(0)
        row, value = _worst(error_R, squares_R)
        if value > self._row[1]:
            self._row = (at + row, value)

    def difference(self, a: torch.Tensor) -> Difference:
        return Difference(
            num_elements=a.numel(),
            num_unequal=self._unequal,
            max_ulp=self._ulp if a.is_floating_point() else None,
            relative=_ratio(self._error, self._squares),
            max_abs=self._max_abs,
            at=tuple(int(i) for i in torch.unravel_index(torch.tensor(self._at), a.shape)) if a.ndim else (),
            worst_row=self._row,
            worst_column=_worst(self._error_C, self._squares_C),
            slope=self._dot / self._squares - 1.0 if self._squares and math.isfinite(self._squares) else 0.0,
            num_nan=(self._nan_a, self._nan_b, self._nan_one),
        )


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(len(tensor), -1) if tensor.ndim > 1 else tensor.reshape(-1, 1)


def _ratio(error: float, squares: float) -> float:
    if not error:
        return 0.0
    return math.sqrt(error / squares) if squares else math.inf


def _worst(error_N: torch.Tensor, squares_N: torch.Tensor) -> tuple[int, float]:
    ratio_N = torch.where(error_N > 0, (error_N / squares_N).sqrt(), 0.0)
    at = int(ratio_N.argmax())
    return at, float(ratio_N[at])


def _largest_ulp(a: torch.Tensor, b: torch.Tensor) -> int:
    dtype = a.dtype if torch.finfo(a.dtype).eps >= torch.finfo(b.dtype).eps else b.dtype
    if dtype.itemsize not in _SIGNED:
        return 0
    x, y = _ordered(a.to(dtype)), _ordered(b.to(dtype))
    return int((x - y).abs().max())


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the numbers, neighbours one apart; both zeros are 0."""
    bits = bits_of(x).view(_SIGNED[x.element_size()])
    lowest = torch.iinfo(bits.dtype).min
    wide = bits.long()
    return torch.where(wide < 0, lowest - wide, wide)


def error_map(a: torch.Tensor, b: torch.Tensor, rows: int = 16, columns: int = 48) -> list[list[float]]:
    """Where two tensors differ, coarsely: the largest difference in each cell of a grid, over the largest of all.

    Args:
        a: of any shape.
        b: of the same shape.
        rows: of the grid, at most.
        columns: of the grid, at most.

    Returns:
        In [0, 1]; -1 where a cell has not-a-numbers in one of the two.
    """
    x_RC, y_RC = _as_rows(a).double(), _as_rows(b).double()
    if x_RC.shape[1] == 1:  # a vector is laid out as one row
        x_RC, y_RC = x_RC.t(), y_RC.t()
    size = min(rows, x_RC.shape[0]), min(columns, x_RC.shape[1])
    has_nan = torch.isnan(x_RC) ^ torch.isnan(y_RC)
    gap_RC = (x_RC - y_RC).abs().nan_to_num_(0.0, 0.0, 0.0)
    top = float(gap_RC.max()) or 1.0
    grid = F.adaptive_max_pool2d(gap_RC[None] / top, size)[0]
    nan_grid = F.adaptive_max_pool2d(has_nan.double()[None], size)[0]
    return torch.where(nan_grid > 0, -1.0, grid).tolist()
