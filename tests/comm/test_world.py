"""Joining: ranks meet, a taken port and an absent rank 0 are said in one message."""

import socket

import pytest
import torch

from drumline.comm import Place, join
from drumline.comm.world import JoinError, choose_device


def test_alone_joins_nothing_and_its_sum_is_itself():
    world = join(Place(), torch.device("cpu"), 1.0)
    assert world.sum([1, 2], torch.int64).tolist() == [1, 2]
    assert world.gather_objects("a") == ["a"]
    assert not torch.distributed.is_initialized()


def test_a_taken_port_is_named_with_what_to_do():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = Place(rank=0, world_size=2, master_port=taken.getsockname()[1], source="slurm")
        with pytest.raises(JoinError, match=r"another process listens on that port; set MASTER_PORT"):
            join(place, torch.device("cpu"), 1.0)


def test_an_absent_first_rank_ends_the_wait_in_time():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = Place(rank=1, world_size=2, master_port=port, source="slurm")
    with pytest.raises(JoinError, match="is rank 0 running there"):
        join(place, torch.device("cpu"), 2.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none_is_refused():
    with pytest.raises(JoinError, match=r"run\.device=cpu"):
        choose_device("cuda", Place())


def test_ranks_that_never_come_are_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = Place(rank=0, world_size=3, master_addr="127.0.0.1", master_port=port)
    with pytest.raises(JoinError) as caught:
        join(place, torch.device("cpu"), 1.0)
    assert str(caught.value) == (
        f"rank 0 of 3 could not join the others at 127.0.0.1:{port}: of 3 ranks 2 did not come within 1 s "
        "(resilience.timeout_s): ranks 1, 2\n"
        "  start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and a RANK of its own"
    )
