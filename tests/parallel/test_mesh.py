import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ranks import ranks

from drumline.parallel import Mesh, build_mesh
from drumline.recipe import Layout

DEGREE = st.sampled_from([1, 2, 3, 4])


@given(DEGREE, DEGREE, DEGREE, DEGREE, DEGREE)
def test_coordinates_number_the_ranks_outermost_axis_first(pp, dp, fsdp, cp, tp):
    layout = Layout(pp=pp, dp=dp, fsdp=fsdp, cp=cp, tp=tp)
    coordinates = itertools.product(range(pp), range(dp), range(fsdp), range(cp), range(tp))
    for rank, expected in enumerate(coordinates):
        mesh = Mesh(layout, None, rank)
        assert tuple(mesh.coordinate(axis) for axis in ("pp", "dp", "fsdp", "cp", "tp")) == expected
        assert mesh.data_rank == expected[1] * fsdp + expected[2]


@ranks(4)
def test_the_device_mesh_agrees_with_the_coordinates():
    rank = torch.distributed.get_rank()
    mesh = build_mesh(Layout(dp=2, fsdp=2), torch.device("cpu"), rank)
    assert mesh.device_mesh.get_local_rank("dp") == mesh.coordinate("dp")
    assert mesh.device_mesh.get_local_rank("fsdp") == mesh.coordinate("fsdp")
    assert mesh.axes("dp").size() == 2
    assert mesh.axes("dp", "fsdp").size() == 4
    assert mesh.axes("tp") is None


@given(DEGREE, DEGREE, DEGREE, DEGREE, DEGREE, st.sampled_from(["pp", "dp", "fsdp", "cp", "tp"]), st.data())
def test_ranks_along_an_axis_differ_along_it_only(pp, dp, fsdp, cp, tp, axis, data):
    layout = Layout(pp=pp, dp=dp, fsdp=fsdp, cp=cp, tp=tp)
    rank = data.draw(st.integers(0, layout.num_ranks - 1))
    mine = Mesh(layout, None, rank)
    expected = [
        other
        for other in range(layout.num_ranks)
        if all(
            Mesh(layout, None, other).coordinate(name) == mine.coordinate(name)
            for name in ("pp", "dp", "fsdp", "cp", "tp")
            if name != axis
        )
    ]
    assert list(mine.ranks_along(axis)) == expected
