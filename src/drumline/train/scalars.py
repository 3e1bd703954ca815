"""Joining the ranks' losses and squared gradients to the two numbers of a step.

Every rank's loss is its own share, but for ranks that share out the computation of the same tokens: the first of them
speaks. Squares are of the gradients that a rank counts, each of which only one rank does.
"""

import math
from collections.abc import Sequence

import torch

from drumline.comm import World
from drumline.numerics import exact_sum
from drumline.optimizers import local_sum_of_squares
from drumline.parallel import Mesh
from drumline.train.step import ReduceScalars


def make_reduce_scalars(world: World, mesh: Mesh, *, exact: bool = False) -> ReduceScalars:
    """Makes the function that joins them.

    Args:
        world: over which is summed.
        mesh: says which ranks have the same tokens.
        exact: the sums are not to depend on which rank has what.

    Returns:
        The function; its result is the same on every rank.
    """

    def reduce(losses_M: torch.Tensor, counted: Sequence[torch.Tensor]) -> tuple[float, float]:
        share = losses_M.double().sum() * mesh.is_first_along("tp")
        squares = local_sum_of_squares(counted)
        both = world.sum(torch.stack([share, squares.double().to(losses_M.device)])).tolist()
        return both[0], both[1]

    def reduce_exactly(losses_M: torch.Tensor, counted: Sequence[torch.Tensor]) -> tuple[float, float]:
        losses = [losses_M] if mesh.is_first_along("tp", "cp") else []
        bounds = world.max([exact_sum.largest(losses), exact_sum.largest(counted)])
        # What is not finite has no words; it need not be exact to stop the run.
        parts = [(losses, bounds[0], False), (counted, bounds[1], True)]
        words = [exact_sum.words(*part[:2], squared=part[2]) if math.isfinite(part[1]) else (0, 0) for part in parts]
        total = world.sum(torch.tensor(words).flatten(), torch.int64).view(2, 2).tolist()
        loss, squares = (
            exact_sum.value(tuple(each), bound, squared=squared) if math.isfinite(bound) else bound
            for each, (_, bound, squared) in zip(total, parts, strict=True)
        )
        return loss, squares

    return reduce_exactly if exact else reduce
