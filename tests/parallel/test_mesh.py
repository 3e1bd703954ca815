import itertools
from datetime import timedelta

import pytest
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


@pytest.mark.parametrize("layout", ["dp4", "fsdp4", "dp2.fsdp2", "cp4", "dp2.cp2", "fsdp2.cp2", "dp2.tp2", "fsdp2.pp2"])
def test_the_device_mesh_has_the_ranks_of_the_axes(layout):
    @ranks(4)
    def body():
        mesh = build_mesh(Layout.model_validate(layout), torch.device("cpu"), torch.distributed.get_rank())
        for name, axes in (
            ("replica", mesh.replica_axes),
            ("shard", mesh.shard_axes),
            ("tp", ("tp",)),
            ("pp", ("pp",)),
        ):
            held = mesh.axes(name)
            assert mesh.ranks_along(*axes) == ((mesh.rank,) if held is None else tuple(held.mesh.tolist()))
        both = mesh.axes("replica", "shard")
        assert (both.size() if both else 1) == mesh.layout.num_ranks // (mesh.layout.pp * mesh.layout.tp)

    body()


@pytest.mark.parametrize(
    "layout",
    ["fsdp4.ep2", "fsdp4.ep4", "dp2.fsdp2.ep2", "fsdp2.cp2.ep2", "fsdp2.cp2.ep4", "fsdp2.tp2.ep2", "pp2.fsdp2.ep2"],
)
def test_the_experts_mesh_has_the_ranks_that_hold_the_same_experts(layout):
    @ranks(4)
    def body():
        mesh = build_mesh(Layout.model_validate(layout), torch.device("cpu"), torch.distributed.get_rank())
        assert mesh.expert_mesh is not None
        assert tuple(mesh.expert_mesh["shard"].mesh.tolist()) == mesh.ranks_along("efsdp")
        assert tuple(mesh.expert_mesh.mesh.flatten().tolist()) == mesh.ranks_along("dp", "efsdp")

    body()


@pytest.mark.parametrize("layout", ["dp4", "dp2.tp2", "pp2.fsdp2", "fsdp4.ep2", "dp2.fsdp2.ep2", "cp2.tp2"])
def test_every_group_waits_for_a_hung_rank_as_long_as_the_world_does(layout):
    @ranks(4, timeout_s=77.0)
    def body():
        mesh = build_mesh(Layout.model_validate(layout), torch.device("cpu"), torch.distributed.get_rank())
        groups = [mesh.group(axis) for axis in ("pp", "dp", "fsdp", "cp", "tp", "efsdp", "ep")]
        for held in (mesh.device_mesh, mesh.expert_mesh):
            groups += held.get_all_groups() if held is not None else []
        waits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups if group is not None}
        assert waits == {timedelta(seconds=77)}

    body()


@pytest.mark.parametrize("layout", ["fsdp4", "cp4.ep2", "cp2.dp2.ep2"])
def test_experts_without_a_sharding_of_their_own_have_no_mesh(layout):
    @ranks(4)
    def body():
        mesh = build_mesh(Layout.model_validate(layout), torch.device("cpu"), torch.distributed.get_rank())
        assert mesh.expert_mesh is None

    body()


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
