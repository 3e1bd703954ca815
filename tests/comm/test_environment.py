import pytest

from drumline.comm.environment import PlaceError, first_host, read_place, set_defaults


def test_a_process_that_nobody_started_as_a_rank_is_alone():
    assert (read_place({}).rank, read_place({}).world_size) == (0, 1)


def test_torchrun_variables_give_the_place():
    place = read_place(
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "h",
            "MASTER_PORT": "5",
        }
    )
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    assert (place.master_addr, place.master_port, place.source) == ("h", 5, "torchrun")


def test_slurm_variables_give_the_place():
    place = read_place(
        {
            "SLURM_PROCID": "9",
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": "16",
            "SLURM_LOCALID": "1",
            "SLURM_TASKS_PER_NODE": "8(x2)",
            "SLURM_STEP_NODELIST": "gpu[003-006,010]",
            "SLURM_JOB_ID": "77",
        }
    )
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (9, 16, 1, 8)
    assert (place.master_addr, place.source) == ("gpu003", "slurm")


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script: one process, whatever the job's size
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
    ],
)
def test_a_slurm_step_of_one_task_or_a_batch_script_is_alone(environ):
    assert read_place(environ).world_size == 1


@pytest.mark.parametrize(
    ("node_list", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1-3]", "n1"), ("n[08,10]", "n08"), ("a-b[1-2]-c,d", "a-b1-c")],
)
def test_the_first_host_of_a_node_list(node_list, host):
    assert first_host(node_list) == host


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is outside a world of 2"),
    ],
)
def test_half_an_environment_is_refused_by_name(environ, says):
    with pytest.raises(PlaceError, match=says):
        read_place(environ)


def test_defaults_do_not_replace_what_the_user_set():
    environ = {"A": "user"}
    set_defaults({"A": "ours", "B": "ours"}, environ)
    assert environ == {"A": "user", "B": "ours"}
