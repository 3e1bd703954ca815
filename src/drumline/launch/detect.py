"""Whether this process starts ranks, is one already, or is the only one.

`torchrun` sets RANK and WORLD_SIZE in each rank; `srun` sets SLURM_PROCID within a step. A SLURM batch script carries
SLURM_PROCID=0 and the job's SLURM_NTASKS although it is one process, so a step is recognized by its own variables.
Source: srun(1), "Output environment variables"; torchrun's documentation, "Environment Variables".
"""

from collections.abc import Mapping

from drumline.recipe.errors import DrumlineError


class LaunchError(DrumlineError):
    """Ranks cannot be started as asked."""


def is_placed(variables: Mapping[str, str]) -> bool:
    """Whether something outside has started this process as one rank of several.

    Args:
        variables: the environment.

    Returns:
        True under `torchrun` or in an `srun` step of more than one task.
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        return True
    in_step = "SLURM_PROCID" in variables and ("SLURM_STEP_ID" in variables or "SLURM_STEPID" in variables)
    num_tasks = variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS") or "1"
    return in_step and num_tasks.isdigit() and int(num_tasks) > 1


def must_launch(nproc: int | None, variables: Mapping[str, str]) -> bool:
    """Whether this process has to start ranks of its own.

    Args:
        nproc: `--nproc`, None where the user did not give it.
        variables: the environment.

    Returns:
        True where more than one rank is wanted here and nothing else has started them.

    Raises:
        LaunchError: `nproc` is below 1, or it is given although this process is a rank already.
    """
    if nproc is None:
        return False
    if nproc < 1:
        raise LaunchError(f"--nproc {nproc} starts no rank; it must be at least 1")
    if is_placed(variables):
        starter = "torchrun" if "RANK" in variables else "srun"
        raise LaunchError(
            f"--nproc {nproc} would start ranks inside a rank: {starter} has started this process already; "
            f"leave --nproc out, or start drumline without {starter}"
        )
    return nproc > 1
