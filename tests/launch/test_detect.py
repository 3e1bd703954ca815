"""Whether a process starts ranks is decided from the environment alone."""

import pytest

from drumline.launch.detect import LaunchError, is_placed, must_launch

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8"}
STEP = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}
STEP_OF_ONE = {**STEP, "SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    ("variables", "placed"),
    [({}, False), (TORCHRUN, True), (STEP, True), (BATCH_SCRIPT, False), (STEP_OF_ONE, False), ({"RANK": "0"}, False)],
)
def test_a_rank_is_recognized_by_torchruns_and_a_slurm_steps_variables(variables, placed):
    assert is_placed(variables) is placed


@pytest.mark.parametrize(("nproc", "launches"), [(None, False), (1, False), (2, True), (8, True)])
def test_ranks_are_started_only_where_more_than_one_is_asked_for(nproc, launches):
    assert must_launch(nproc, BATCH_SCRIPT) is launches


@pytest.mark.parametrize("variables", [TORCHRUN, STEP])
def test_nproc_inside_a_rank_is_refused_with_what_to_do(variables):
    with pytest.raises(LaunchError, match="leave --nproc out"):
        must_launch(2, variables)


def test_no_rank_at_all_is_refused():
    with pytest.raises(LaunchError, match="at least 1"):
        must_launch(0, {})
