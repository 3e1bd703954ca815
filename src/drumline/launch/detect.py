"""Whether this process starts ranks, is one already, or is the only one."""

from drumline.comm import Place
from drumline.recipe.errors import DrumlineError


class LaunchError(DrumlineError):
    """Ranks cannot be started as asked."""


def must_launch(nproc: int | None, place: Place) -> bool:
    """Whether this process has to start ranks of its own.

    Args:
        nproc: `--nproc`, None where the user did not give it.
        place: where this process stands, as read from the environment.

    Returns:
        True where more than one rank is wanted here and nothing else has started them.

    Raises:
        LaunchError: `nproc` is below 1, or it is given although this process is a rank already.
    """
    if nproc is None:
        return False
    if nproc < 1:
        raise LaunchError(f"--nproc {nproc} starts no rank; it must be at least 1")
    if place.source != "alone":
        raise LaunchError(
            f"--nproc {nproc} would start ranks inside a rank: {place.source} has started this process already; "
            f"leave --nproc out, or start drumline without {place.source}"
        )
    return nproc > 1
