"""Whether a process starts ranks is decided by its place and what is asked for."""

import pytest

from drumline.comm import Place
from drumline.launch.detect import LaunchError, must_launch


@pytest.mark.parametrize(("nproc", "launches"), [(None, False), (1, False), (2, True), (8, True)])
def test_ranks_are_started_only_where_more_than_one_is_asked_for(nproc, launches):
    assert must_launch(nproc, Place()) is launches


@pytest.mark.parametrize("source", ["torchrun", "slurm"])
def test_nproc_inside_a_rank_is_refused_with_what_to_do(source):
    with pytest.raises(LaunchError, match="leave --nproc out"):
        must_launch(2, Place(rank=1, world_size=4, source=source))


def test_no_rank_at_all_is_refused():
    with pytest.raises(LaunchError, match="at least 1"):
        must_launch(0, Place())
