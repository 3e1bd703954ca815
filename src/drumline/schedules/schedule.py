"""A pipeline schedule: for every rank the actions that it runs, in order, and which rank holds which stage.

This one object is generated, checked, simulated, drawn and executed. It says nothing about communication, which
follows from it: what a forward gives is sent to the rank of the next stage, an input gradient to that of the previous.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from drumline.schedules.action import Action, Kind


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule.

    Attributes:
        name: of the algorithm or the file.
        num_microbatches: micro-batches of a step.
        placement: the rank of each stage.
        order: the actions of each rank, in the order in which the rank runs them.
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    order: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """The pipeline-parallel degree."""
        return len(self.order)

    @property
    def num_stages(self) -> int:
        """Stages of the model, on all ranks."""
        return len(self.placement)

    @cached_property
    def is_split(self) -> bool:
        """Whether some backward is split into input gradient and weight gradient."""
        return any(action.kind in (Kind.INPUT, Kind.WEIGHT) for actions in self.order for action in actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, along the model."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)


def looped(num_ranks: int, virtual: int) -> tuple[int, ...]:
    """The placement that goes round the ranks `virtual` times: stage s is on rank s mod num_ranks."""
    return tuple(range(num_ranks)) * virtual


def v_shaped(num_ranks: int) -> tuple[int, ...]:
    """The placement that goes down the ranks and up again: rank r holds stages r and 2 num_ranks - 1 - r."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def keep_microbatches(actions: Iterable[Action], num_microbatches: int) -> tuple[Action, ...]:
    """Leaves out the micro-batches from `num_microbatches` on.

    What is left of a sound schedule is sound, since no micro-batch waits for another. So a schedule that is defined
    from some number of micro-batches on gives one for fewer.
    """
    return tuple(action for action in actions if action.microbatch < num_microbatches)
