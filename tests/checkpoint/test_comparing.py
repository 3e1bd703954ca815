"""Comparing commits: bits, not values, across layouts."""

import math

import pytest
import torch

from drumline.checkpoint import Commit, Piece, Saver, open_commit, whole
from drumline.checkpoint.comparing import compare


def commit_of(directory, pieces, chunk_bytes=64) -> Commit:
    with Saver(directory, chunk_bytes=chunk_bytes) as saver:
        return open_commit(saver.save(1, pieces, {}).wait())


def differences(tmp_path, one: torch.Tensor, other: torch.Tensor):
    a = commit_of(tmp_path / "a", [whole("x", one)])
    b = commit_of(tmp_path / "b", [whole("x", other)])
    return list(compare(a, b))


def test_the_same_bits_cut_otherwise_are_equal(tmp_path):
    tensor = torch.randn(30, 20)
    rows = [Piece("x", (30, 20), (0, 0), tensor[:11]), Piece("x", (30, 20), (11, 0), tensor[11:])]
    columns = [Piece("x", (30, 20), (0, at), tensor[:, at : at + 5]) for at in range(0, 20, 5)]
    a = commit_of(tmp_path / "a", rows)
    b = commit_of(tmp_path / "b", columns, chunk_bytes=100)
    assert list(compare(a, b)) == []
    assert list(compare(b, a)) == []


def test_a_difference_is_counted_and_measured_across_layouts(tmp_path):
    tensor = torch.randn(30, 20)
    changed = tensor.clone()
    changed[29, 19] += 0.5
    changed[0, 0] -= 0.25
    a = commit_of(tmp_path / "a", [whole("x", tensor), whole("y", tensor)])
    b = commit_of(
        tmp_path / "b",
        [Piece("x", (30, 20), (0, at), changed[:, at : at + 10]) for at in (0, 10)] + [whole("y", tensor)],
    )
    (found,) = compare(a, b)
    assert (found.name, found.kind, found.num_elements, found.num_different) == ("x", "value", 600, 2)
    assert found.max_abs == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("one", "other", "max_abs"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.tensor([math.nan]), torch.tensor([1.0]), math.inf),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), math.inf),
        (torch.tensor([3]), torch.tensor([5]), 2.0),
        (torch.tensor(1.0).bfloat16(), torch.tensor(2.0).bfloat16(), 1.0),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
    ],
)
def test_bits_that_differ_are_found_whatever_their_values(tmp_path, one, other, max_abs):
    (found,) = differences(tmp_path, one, other)
    assert (found.num_different, found.max_abs) == (1, max_abs)


def test_the_same_nan_is_no_difference(tmp_path):
    assert differences(tmp_path, torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0])) == []


def test_tensors_of_one_side_and_other_shapes_and_dtypes_are_told(tmp_path):
    ones = torch.ones(1)
    a = commit_of(tmp_path / "a", [whole("only_a", ones), whole("s", torch.ones(2)), whole("d", ones)])
    b = commit_of(tmp_path / "b", [whole("only_b", ones), whole("s", torch.ones(3)), whole("d", ones.double())])
    kinds = [(found.name, found.kind) for found in compare(a, b)]
    assert kinds == [("d", "dtype"), ("only_a", "only in A"), ("only_b", "only in B"), ("s", "shape")]
    assert [found.name for found in compare(a, b, prefix="only")] == ["only_a", "only_b"]
