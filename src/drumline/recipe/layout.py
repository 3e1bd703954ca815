"""The layout: how a run is spread over ranks, as degrees of each kind of parallelism.

A layout is also a short string, `dp2.fsdp4.tp2.cp2.pp4.ep2`: an axis and its degree, joined by dots, in any order; an
axis that is left out has degree 1. The mesh is ordered pp, dp, fsdp, cp, tp, outermost first; ep borrows ranks from
fsdp x cp and so does not multiply the world.
"""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

AXES = ("pp", "dp", "fsdp", "cp", "tp", "ep")
MESH_AXES = ("pp", "dp", "fsdp", "cp", "tp")
_PART = re.compile(r"(pp|dp|fsdp|cp|tp|ep)([1-9][0-9]{0,9})")

MAX_DEGREE = 2**31 - 1
SCHEDULE_STAGES: dict[str, int | None] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved-1f1b": None,
    "zb-h1": 1,
    "interleaved-zero-bubble": None,
    "zbv": 2,
    "dualpipev": 2,
}
"""Stages a rank of each pipeline schedule; None where one may choose, from 2 on."""

FEWEST_STAGES = 2
"""Stages a rank where one may choose and does not."""

SPLIT_SCHEDULES = ("zb-h1", "interleaved-zero-bubble", "zbv", "dualpipev")
"""Those that split the backward in two."""

V_SCHEDULES = ("zbv", "dualpipev")
"""Those that put the first and the last stage on one rank."""

ContextMethod = Literal["ring", "gather", "ulysses", "ring_ulysses"]
Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE)]


def can_deal_heads(num_heads: int, num_kv_heads: int, degree: int) -> bool:
    """Whether Ulysses ranks can each take whole query heads, with the key/value heads that serve them.

    Args:
        num_heads: H, of a rank.
        num_kv_heads: G, of a rank; fewer than ranks are copied.
        degree: ranks of a Ulysses group.

    Returns:
        Whether they can.
    """
    return num_heads % degree == 0 and (num_kv_heads % degree == 0 or degree % num_kv_heads == 0)


class LayoutError(ValueError):
    """A layout string that cannot be read; the message says which part and what the grammar is."""


def parse(text: str) -> dict[str, int]:
    """Reads a layout string.

    Args:
        text: e.g. `"dp2.fsdp4"`.

    Returns:
        The degree of each axis that the string names.

    Raises:
        LayoutError: a part is no axis with a degree, or an axis is named twice.
    """
    degrees: dict[str, int] = {}
    for part in text.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            raise LayoutError(
                f"{part!r} in layout {text!r} is no axis with a degree; axes are {', '.join(AXES)}, e.g. dp2.fsdp4.tp2"
            )
        axis, degree = match[1], int(match[2])
        if axis in degrees:
            raise LayoutError(f"{axis} is named twice in layout {text!r}")
        degrees[axis] = degree
    return degrees


class Layout(BaseModel):
    """Degrees of every parallelism. Accepts a layout string wherever a table is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pp: Degree = Field(default=1, description="Pipeline-parallel degree: stages the layers are cut into.")
    dp: Degree = Field(default=1, description="Data-parallel degree: whole replicas of the (possibly sharded) model.")
    fsdp: Degree = Field(
        default=1, description="Fully-sharded degree: ranks that share one replica's parameters (see zero)."
    )
    cp: Degree = Field(default=1, description="Context-parallel degree: ranks that share one sequence.")
    tp: Degree = Field(default=1, description="Tensor-parallel degree: ranks that share each matmul.")
    ep: Degree = Field(default=1, description="Expert-parallel degree; borrows ranks from fsdp x cp.")
    zero: Literal[1, 2, 3] = Field(
        default=3,
        description="What the fsdp axis shards: 1 optimizer states, 2 also gradients, 3 also parameters.",
    )
    sequence_parallel: bool = Field(
        default=True, description="Between matmuls, tp ranks work on shares of the tokens rather than on all of them."
    )
    tp_async: bool = Field(
        default=False,
        description="Transfers between tp ranks go in chunks around a ring, each hidden behind the matmul of the one "
        "before; needs sequence_parallel.",
    )
    cp_method: ContextMethod = Field(
        default="ring",
        description="How cp ranks attend to each other's tokens: pass keys and values around a ring, gather them, "
        "trade tokens for heads (Ulysses), or Ulysses within groups and rings between them.",
    )
    cp_ulysses: Degree = Field(default=1, description="Ranks of a Ulysses group; for ring_ulysses only.")

    pp_schedule: str = Field(
        default="1f1b",
        description="In which order pipeline ranks compute: gpipe, 1f1b, interleaved-1f1b, zb-h1, "
        "interleaved-zero-bubble, zbv, dualpipev, or a CSV file of actions.",
    )
    pp_virtual: Annotated[int, Field(ge=0, le=MAX_DEGREE)] = Field(
        default=0, description="Pipeline stages on each rank; 0: what the schedule needs, or 2 where one may choose."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return parse(value) if isinstance(value, str) else value

    @property
    def num_ranks(self) -> int:
        """Ranks that the layout needs: the product of all axes but ep."""
        return math.prod(getattr(self, axis) for axis in MESH_AXES)

    @property
    def data_degree(self) -> int:
        """Ranks that see different sequences: dp x fsdp."""
        return self.dp * self.fsdp

    @property
    def ulysses_degree(self) -> int:
        """Context-parallel ranks that trade tokens for heads: all, some or none (1)."""
        return {"ulysses": self.cp, "ring_ulysses": self.cp_ulysses}.get(self.cp_method, 1)

    @property
    def num_stages(self) -> int | None:
        """Stages of the pipeline, on all ranks; None where only the schedule's file knows."""
        if self.pp == 1:
            return 1
        if self.pp_schedule not in SCHEDULE_STAGES:
            return None
        return self.pp * (self.pp_virtual or SCHEDULE_STAGES[self.pp_schedule] or FEWEST_STAGES)

    def __str__(self) -> str:
        parts = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return ".".join(parts) or "dp1"
