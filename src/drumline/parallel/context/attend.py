"""The one entry: which attention a layout's context parallelism takes, and over which groups."""

from dataclasses import dataclass

import torch.distributed as dist

from drumline.models import Attend
from drumline.parallel.context.gather import GatherAttend
from drumline.parallel.context.ring import RingAttend
from drumline.parallel.context.split import ContextSplit
from drumline.parallel.context.ulysses import UlyssesAttend
from drumline.parallel.mesh import Mesh, own_group
from drumline.recipe.errors import DrumlineError
from drumline.recipe.layout import ContextMethod


@dataclass(frozen=True)
class ContextGroups:
    """The ranks that share a sequence, arranged as rings of Ulysses groups: cp rank = ring rank x ulysses + ulysses
    rank. A group of one rank is None.

    Attributes:
        split: this rank's place among all ranks that share its sequence.
        ulysses_degree: ranks of a Ulysses group, neighbours along cp.
        ring: this rank's ring.
        ulysses: this rank's Ulysses group.
    """

    split: ContextSplit
    ulysses_degree: int
    ring: dist.ProcessGroup | None
    ulysses: dist.ProcessGroup | None

    @property
    def ring_split(self) -> ContextSplit:
        """This rank's place in the sequence once its Ulysses group has put its tokens together."""
        return ContextSplit(self.split.degree // self.ulysses_degree, self.split.rank // self.ulysses_degree)


def context_groups(mesh: Mesh, ulysses_degree: int = 1) -> ContextGroups:
    """Makes the groups of a layout's cp axis. Every rank of the world must call it.

    Args:
        mesh: of the layout.
        ulysses_degree: 1 for ring and gather, cp for ulysses, between for ring_ulysses; divides cp.

    Returns:
        This rank's.

    Raises:
        DrumlineError: the degree does not divide cp.
    """
    degree = mesh.layout.cp
    if degree % ulysses_degree:
        fitting = ", ".join(str(n) for n in range(1, degree + 1) if degree % n == 0)
        raise DrumlineError(
            f"Ulysses groups of {ulysses_degree} ranks do not divide layout.cp = {degree}\n  try: {fitting}"
        )
    lines = mesh.lines("cp")
    rings = [line[first::ulysses_degree] for line in lines for first in range(ulysses_degree)]
    neighbours = [line[first : first + ulysses_degree] for line in lines for first in range(0, degree, ulysses_degree)]
    return ContextGroups(
        ContextSplit(degree, mesh.coordinate("cp")),
        ulysses_degree,
        own_group(rings),
        own_group(neighbours),
    )


def context_attend(method: ContextMethod, groups: ContextGroups, local: Attend) -> Attend:
    """Chooses what computes attention over a sequence that several ranks share.

    The result is called with a rank's own tokens, in the order of `ContextSplit.positions`, with the rotary tables of
    *all* positions of the sequence, and with document starts that are positions in the whole row.

    Args:
        method: `ring` passes keys and values around; `gather` gathers them; `ulysses` trades tokens for heads;
            `ring_ulysses` does so within groups and passes keys and values between them.
        groups: from `context_groups`, with the Ulysses degree that the method wants.
        local: what computes attention on one device; Ulysses lets it work on whole sequences.

    Returns:
        An `Attend`.

    Raises:
        DrumlineError: the groups do not fit the method.
    """
    degree, ulysses = groups.split.degree, groups.ulysses_degree
    wanted = {"ring": ulysses == 1, "gather": ulysses == 1, "ulysses": ulysses == degree, "ring_ulysses": True}
    if method not in wanted:
        raise DrumlineError(f"{method!r} is no way to compute attention across ranks\n  try: {', '.join(wanted)}")
    if not wanted[method]:
        needed = degree if method == "ulysses" else 1
        raise DrumlineError(f"{method} over cp = {degree} needs Ulysses groups of {needed} ranks, not {ulysses}")
    if method == "gather":
        return GatherAttend(groups.split, groups.ring)
    inner = local if ulysses == degree else RingAttend(groups.ring_split, groups.ring)
    return inner if ulysses == 1 else UlyssesAttend(inner, ulysses, groups.ulysses)
