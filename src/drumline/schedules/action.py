"""One action of a pipeline schedule, and its text: stage, kind, micro-batch, such as `2F0`.

    F  forward
    B  backward, whole
    I  the part of the backward that gives the gradient of the stage's input
    W  the part that gives the gradient of its weights, which nobody waits for

B does what I and W do, in one go. The text is that of `torch.distributed.pipelining`.
"""

import re
from enum import StrEnum
from typing import NamedTuple

_TEXT = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")


class Kind(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


class Action(NamedTuple):
    """One computation of a stage on a micro-batch.

    Attributes:
        stage: the stage, counted along the model from 0.
        kind: what is computed.
        microbatch: the micro-batch, from 0.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        """The action as text, such as `2F0`."""
        return f"{self.stage}{self.kind.value}{self.microbatch}"


def parse(text: str) -> Action | None:
    """Reads an action.

    Args:
        text: such as `2F0`.

    Returns:
        The action; None where the text is none.
    """
    match = _TEXT.fullmatch(text)
    return Action(int(match[1]), Kind(match[2]), int(match[3])) if match else None
