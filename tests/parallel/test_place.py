import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drumline.parallel.mesh import EXPERT_AXES, Mesh
from drumline.parallel.place import EXPERT_DATA_AXES, Place, clear_padding, held
from drumline.recipe import Layout
from drumline.recipe.layout import MESH_AXES

DEGREE = st.sampled_from([1, 2, 3])


@given(DEGREE, DEGREE, DEGREE, DEGREE, st.data())
def test_the_experts_see_the_same_ranks_with_fsdp_and_cp_counted_through(dp, fsdp, cp, tp, data):
    ep = data.draw(st.sampled_from([n for n in range(1, fsdp * cp + 1) if (fsdp * cp) % n == 0]))
    layout = Layout(dp=dp, fsdp=fsdp, cp=cp, tp=tp, ep=ep)
    coordinates = itertools.product(range(1), range(dp), range(fsdp * cp // ep), range(ep), range(tp))
    for rank, expected in enumerate(coordinates):
        assert tuple(Mesh(layout, None, rank).coordinate(axis) for axis in EXPERT_AXES) == expected


@given(
    DEGREE, DEGREE, DEGREE, DEGREE, DEGREE, st.sampled_from([("dp",), ("cp", "tp"), ("pp", "fsdp"), EXPERT_DATA_AXES])
)
def test_lines_cover_the_world_once(pp, dp, fsdp, cp, tp, axes):
    mesh = Mesh(Layout(pp=pp, dp=dp, fsdp=fsdp, cp=cp, tp=tp), None, 0)
    lines = mesh.lines(*axes)
    assert sorted(rank for line in lines for rank in line) == list(range(mesh.layout.num_ranks))
    assert all(len(line) == math.prod(mesh.degree(axis) for axis in axes) for line in lines)


def test_axes_of_two_views_are_refused():
    with pytest.raises(KeyError, match="fsdp"):
        Mesh(Layout(fsdp=2, ep=2), None, 0).ranks_along("fsdp", "ep")


@given(DEGREE, DEGREE, DEGREE, DEGREE, DEGREE, st.booleans())
def test_each_part_is_counted_by_one_rank(pp, dp, fsdp, cp, tp, over_tp):
    layout = Layout(pp=pp, dp=dp, fsdp=fsdp, cp=cp, tp=tp)
    axes = tuple(axis for axis in MESH_AXES if axis != "pp" and (over_tp or axis != "tp"))
    place = Place((8,), (0,), copied=axes)
    firsts = sum(place.is_first(Mesh(layout, None, rank)) for rank in range(layout.num_ranks))
    shares = fsdp * cp if fsdp > 1 else 1  # FSDP gives each of these ranks a part of its own
    assert firsts == shares * pp * (1 if over_tp else tp)


def test_a_part_on_two_stages_is_counted_by_the_first_of_them():
    layout = Layout(pp=3, dp=2, tp=2)
    place = Place((8, 2), (4, 0), stages=(0, 2))
    assert place.replicas(Mesh(layout, None, 1)) == (1, 3, 9, 11)
    assert place.replicas(Mesh(layout, None, 11)) == (1, 3, 9, 11)
    assert [rank for rank in (1, 3, 9, 11) if place.is_first(Mesh(layout, None, rank))] == [1]


def test_padding_is_no_part_of_what_is_held_and_is_cleared():
    param = nn.Parameter(torch.arange(1.0, 13.0).reshape(4, 3))
    place = Place((10, 3), (8, 0))
    part = held(param, place)
    assert part.tensor.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert (part.offsets, part.shape) == ((8, 0), (10, 3))
    model = nn.ParameterDict({"weight": param})
    clear_padding(model, {"weight": place})
    assert param.tolist() == [[1, 2, 3], [4, 5, 6], [0, 0, 0], [0, 0, 0]]


def test_a_part_wholly_beyond_the_end_is_empty():
    part = held(torch.ones(4, 3), Place((10, 3), (12, 0)))
    assert part.tensor.shape == (0, 3)
    assert part.offsets == (10, 0)
