"""Lanes: the fixed parts of a global batch that exact mode sums gradients by, and who owns which.

A lane is a run of consecutive samples of every global batch, in whole micro-batches. How many lanes there are belongs
to the recipe; a data-parallel rank owns consecutive lanes, as many as any other or one more.
"""

from dataclasses import dataclass

from drumline.recipe.sections import Recipe

MOST_BY_DEFAULT = 8


def num_lanes(recipe: Recipe) -> int:
    """The lanes of a recipe in exact mode.

    Args:
        recipe: data and numerics are read, the layout is not.

    Returns:
        `numerics.lanes`; where that is 0, the largest power of two up to 8 that cuts the batch into whole
        micro-batches.
    """
    if recipe.numerics.lanes:
        return recipe.numerics.lanes
    microbatches = recipe.data.global_batch // recipe.data.micro_batch
    if recipe.data.global_batch % recipe.data.micro_batch:
        return 1
    return min(MOST_BY_DEFAULT, microbatches & -microbatches)


def num_blocks(recipe: Recipe) -> int:
    """Fixed slices that products are summed by; 1 outside of exact mode."""
    return recipe.numerics.blocks if recipe.numerics.mode == "exact" else 1


def lanes_of(data_rank: int, data_degree: int, count: int) -> range:
    """The lanes that a data-parallel rank owns.

    Args:
        data_rank: in [0, data_degree).
        data_degree: ranks that see different data, at most `count`.
        count: lanes of the recipe.

    Returns:
        Consecutive lanes; the first ranks have one more where they cannot be dealt evenly, as 3 + 3 + 2.
    """
    each, over = divmod(count, data_degree)
    start = data_rank * each + min(data_rank, over)
    return range(start, start + each + (data_rank < over))


def samples_of(data_rank: int, data_degree: int, recipe: Recipe) -> range:
    """The samples of each global batch that a data-parallel rank reads, by their place in it.

    Args:
        data_rank: in [0, data_degree).
        data_degree: ranks that see different data.
        recipe: without problems.

    Returns:
        In exact mode those of its lanes, else an equal slice.
    """
    count = num_lanes(recipe) if recipe.numerics.mode == "exact" else data_degree
    owned, size = lanes_of(data_rank, data_degree, count), recipe.data.global_batch // count
    return range(owned.start * size, owned.stop * size)


@dataclass(frozen=True)
class Lanes:
    """The lanes of a run.

    Attributes:
        num_lanes: of the global batch.
        num_microbatches: of a lane.
        data_degree: ranks that own them.
    """

    num_lanes: int
    num_microbatches: int
    data_degree: int

    def owned_by(self, data_rank: int) -> range:
        """The lanes of a data-parallel rank."""
        return lanes_of(data_rank, self.data_degree, self.num_lanes)


def lanes(recipe: Recipe) -> Lanes | None:
    """The lanes of a run in exact mode; None in any other."""
    if recipe.numerics.mode != "exact":
        return None
    count = num_lanes(recipe)
    return Lanes(count, recipe.data.global_batch // count // recipe.data.micro_batch, recipe.layout.data_degree)


def threads_of(recipe: Recipe) -> int:
    """CPU threads a rank that a recipe fixes: one in exact mode, where more may move bits, unless it says otherwise.

    0: it fixes none.
    """
    return recipe.run.threads or int(recipe.numerics.mode == "exact")
