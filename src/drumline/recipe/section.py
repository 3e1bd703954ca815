"""What every section of a recipe is, and the numbers that many of them hold."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_INT64 = 2**63 - 1  # the largest integer that TOML holds
Positive = Annotated[int, Field(ge=1, le=_INT64)]
Natural = Annotated[int, Field(ge=0, le=_INT64)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)
