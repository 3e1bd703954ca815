"""Index arithmetic against numpy: any cut of a tensor into boxes, read as any other."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.checkpoint import Piece, Saver, open_commit
from drumline.checkpoint.boxes import Box, slabs, tiling_problem
from drumline.checkpoint.piece import share

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape: tuple[int, ...]) -> Box:
    starts = [draw(st.integers(0, extent)) for extent in shape]
    return Box(tuple(starts), tuple(draw(st.integers(0, n - a)) for a, n in zip(starts, shape, strict=True)))


@st.composite
def tilings(draw, shape: tuple[int, ...], depth: int = 4) -> list[Box]:
    """A cut into boxes by splitting again and again, along any dim: not only grids."""

    def split(box: Box, left: int) -> list[Box]:
        dims = [dim for dim, extent in enumerate(box.shape) if extent > 1]
        if not left or not dims or not draw(st.booleans()):
            return [box]
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.shape[dim] - 1))
        low = (*box.shape[:dim], at, *box.shape[dim + 1 :])
        high = (*box.shape[:dim], box.shape[dim] - at, *box.shape[dim + 1 :])
        moved = (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :])
        return split(Box(box.offsets, low), left - 1) + split(Box(moved, high), left - 1)

    return split(Box((0,) * len(shape), shape), depth)


def marked(shape: tuple[int, ...], box: Box) -> np.ndarray:
    mask = np.zeros(shape, dtype=int)
    mask[box.within(Box((0,) * len(shape), shape))] = 1
    return mask


@given(st.data())
def test_what_two_boxes_have_in_common_is_what_numpy_says(data):
    shape = data.draw(shapes)
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = marked(shape, one) * marked(shape, other)
    common = one.meet(other)
    assert common == other.meet(one)
    if common is None:
        assert not both.any()
    else:
        assert (both == marked(shape, common)).all()
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        whole = Box((0,) * len(shape), shape)
        assert (array[one.within(whole)][common.within(one)] == array[common.within(whole)]).all()


@given(shapes, st.sampled_from([1, 2, 4, 8]), st.integers(8, 200))
def test_slabs_are_contiguous_bounded_and_cover_the_tensor_in_order(shape, itemsize, chunk_bytes):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    cut = slabs(shape, itemsize, chunk_bytes)
    whole = Box((0,) * len(shape), shape)
    assert [x for slab in cut for x in array[slab.box.within(whole)].flatten()] == list(range(array.size))
    assert all(slab.num_bytes <= max(chunk_bytes, itemsize) for slab in cut)
    assert [slab.start for slab in cut] == list(np.cumsum([0, *(slab.num_bytes for slab in cut)])[:-1])


def test_an_empty_tensor_has_no_slabs():
    assert slabs((3, 0, 2), 4, 64) == []


@given(st.data())
def test_a_tiling_is_accepted_and_any_fault_in_it_is_not(data):
    shape = data.draw(shapes)
    tiling = data.draw(tilings(shape))
    assert tiling_problem(shape, tiling) is None
    victim = data.draw(st.integers(0, len(tiling) - 1))
    assert "in no piece" in tiling_problem(shape, tiling[:victim] + tiling[victim + 1 :])[0]
    reason, blamed = tiling_problem(shape, [*tiling, tiling[victim]])
    assert "overlap" in reason
    assert set(blamed) == {victim, len(tiling)}
    if shape:
        box = tiling[victim]
        moved = Box((box.offsets[0] + shape[0], *box.offsets[1:]), box.shape)
        assert "reaches out" in tiling_problem(shape, [*tiling[:victim], moved, *tiling[victim + 1 :]])[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_cut_is_read_as_any_other(data):
    shape = data.draw(shapes)
    dtype = data.draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.uint8]))
    array = torch.arange(np.prod(shape, dtype=int)).reshape(shape).to(dtype)
    whole = Box((0,) * len(shape), shape)
    stored = [Piece("a", shape, box.offsets, array[box.within(whole)]) for box in data.draw(tilings(shape))]
    wanted_boxes = data.draw(tilings(shape)) + [data.draw(boxes_in(shape)) for _ in range(2)]
    wanted = [Piece("a", shape, box.offsets, torch.full(box.shape, 99).to(dtype)) for box in wanted_boxes]
    backwards = tuple(range(len(shape))[::-1])
    transposed = Piece("a", shape, whole.offsets, torch.zeros(shape[::-1], dtype=dtype).permute(backwards))
    with tempfile.TemporaryDirectory() as folder:
        chunk_bytes = data.draw(st.sampled_from([16, 64, 1 << 20]))
        with Saver(Path(folder), chunk_bytes=chunk_bytes, asynchronous=False) as saver:
            commit = open_commit(saver.save(1, stored, {}).wait())
        num_read = commit.read_into([*wanted, transposed])
        assert num_read == array.nbytes, "each stored byte is read once, however many want it"
        assert torch.equal(commit.tensor("a"), array)
    for piece in [*wanted, transposed]:
        assert torch.equal(piece.tensor, array[piece.box.within(whole)])


@given(st.data())
def test_replicas_share_the_writing_by_bytes_and_agree_without_a_word(data):
    num_ranks = data.draw(st.integers(1, 6))
    group_of = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(lambda group: tuple(sorted(group)))
    groups = data.draw(st.lists(group_of, min_size=1, max_size=3, unique=True))
    held = [
        (f"t{number}", data.draw(st.integers(0, 50)), data.draw(st.sampled_from(groups)))
        for number in range(data.draw(st.integers(1, 25)))
    ]
    written: dict[str, list[int]] = {name: [] for name, _, _ in held}
    loads: dict[tuple[int, ...], dict[int, int]] = {group: dict.fromkeys(group, 0) for group in groups}
    for rank in range(num_ranks):
        mine = [
            Piece(name, (size,), (0,), torch.zeros(size, dtype=torch.uint8), group)
            for name, size, group in held
            if rank in group
        ]
        data.draw(st.randoms()).shuffle(mine)  # the order in which a rank lists its pieces is of no consequence
        for piece in share(mine, rank):
            written[piece.name].append(rank)
            loads[piece.replicas][rank] += piece.num_bytes
    assert all(len(ranks) == 1 for ranks in written.values())
    for group, load in loads.items():
        largest = max((size for _, size, other in held if other == group), default=0)
        assert max(load.values()) - min(load.values()) <= largest


def test_a_replica_that_does_not_name_itself_is_refused():
    with pytest.raises(Exception, match=r"replicas \[1, 2\] do not include rank 0"):
        share([Piece("a", (1,), (0,), torch.zeros(1), (1, 2))], 0)
