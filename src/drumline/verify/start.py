"""The weights that a layout is verified from.

Those of a run, but for norms: at 1 each, their order and their exchange would not be seen. They are moved by up to a
fifth, element by element.
"""

from collections.abc import Callable

import torch
from torch import nn

from drumline import models
from drumline.models.initialize import Part, weight_std
from drumline.numerics.random import uniform

SPREAD = 0.2


def fill(model: nn.Module, seed: int, part_of: Callable[[str, torch.Tensor], Part] | None = None) -> None:
    """Gives a model, or a rank's part of it, its values.

    Args:
        model: as for `models.initialize`.
        seed: of the run.
        part_of: what a parameter of a name holds of its logical tensor; None: all of it.
    """
    if part_of is None:
        models.initialize(model, seed)
    else:
        models.initialize(model, seed, part_of)
    for name, parameter in model.named_parameters():
        if weight_std(name, model.shape) is None:  # pyright: ignore[reportArgumentType]
            _move(name, parameter, seed, part_of)


@torch.no_grad()
def _move(name: str, parameter: torch.Tensor, seed: int, part_of: Callable[[str, torch.Tensor], Part] | None) -> None:
    part = parameter if part_of is None else part_of(name, parameter).tensor
    first = 0 if part_of is None else part_of(name, parameter).offsets[0]
    drawn = uniform(seed, f"verify/{name}", first, part.shape[0], device=part.device)
    part.detach().mul_(1.0 + SPREAD * (2.0 * drawn - 1.0))
