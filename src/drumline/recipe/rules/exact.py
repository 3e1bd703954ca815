"""Rules of exact mode: lanes and blocks fit the batch and the layout, and nothing moves bits with the layout."""

from collections.abc import Iterator

from drumline.recipe.lanes import MOST_BY_DEFAULT, num_lanes
from drumline.recipe.nearest import nearest
from drumline.recipe.problem import Problem, problem
from drumline.recipe.rules.machine import Machine
from drumline.recipe.rules.pieces import PIECE_RULES
from drumline.recipe.sections import Recipe


def lanes_are_a_power_of_two(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Lanes are the leaves of a binary tree, and blocks are, too."""
    for name in ("lanes", "blocks"):
        value = getattr(recipe.numerics, name)
        if value & (value - 1):
            near = nearest(value, _is_power_of_two)
            yield problem(recipe, f"exact-{name}", f"numerics.{name}", "is no power of two", near)


def lanes_hold_whole_micro_batches(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Every lane is as many micro-batches, whoever owns it."""
    lanes, data = num_lanes(recipe), recipe.data
    if not _is_power_of_two(lanes):
        return  # said already
    if data.global_batch % data.micro_batch:
        rule = f"does not divide data.global_batch = {data.global_batch}"
        near = nearest(data.micro_batch, lambda n: data.global_batch % n == 0, high=data.global_batch)
        yield problem(recipe, "exact-micro-batch", "data.micro_batch", rule, near)
    elif data.global_batch % lanes:
        rule = f"cannot share out data.global_batch = {data.global_batch} evenly"
        near = nearest(lanes, lambda n: _is_power_of_two(n) and data.global_batch % (n * data.micro_batch) == 0)
        yield problem(recipe, "exact-lanes-batch", "numerics.lanes", rule, near)
    elif data.global_batch // lanes % data.micro_batch:
        size = data.global_batch // lanes
        rule = f"does not divide a lane, {size} of data.global_batch = {data.global_batch} / numerics.lanes = {lanes}"
        near = nearest(data.micro_batch, lambda n: size % n == 0, high=size)
        yield problem(recipe, "exact-micro-batch", "data.micro_batch", rule, near)


def every_rank_has_a_lane(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A data-parallel rank owns a lane at least; ranks that work in step own equally many."""
    lanes, layout, degree = num_lanes(recipe), recipe.layout, recipe.layout.data_degree
    data, ranks = recipe.data, f"layout.dp x fsdp = {recipe.layout.data_degree}"
    if not _is_power_of_two(lanes):
        return
    if degree > lanes:
        wanted = 1 << (degree - 1).bit_length()
        size = wanted * data.micro_batch
        if recipe.numerics.lanes or wanted > MOST_BY_DEFAULT or data.global_batch % size == 0:
            rule = f"makes {lanes} lanes, fewer than the ranks that need one each, {ranks}"
            yield problem(recipe, "exact-lanes-ranks", "numerics.lanes", rule, [wanted])
            return
        rule = (
            f"makes {data.global_batch // max(1, data.micro_batch)} micro-batches of data.micro_batch = "
            f"{data.micro_batch}, {lanes} lanes, but {ranks}: each needs one"
        )
        fits = -(-data.global_batch // size) * size
        yield problem(recipe, "exact-lanes-ranks", "data.global_batch", rule, [fits])
    elif lanes % degree and (layout.fsdp > 1 or layout.pp > 1):
        why = "gather parameters together" if layout.fsdp > 1 else "hand on micro-batches together"
        key = "layout.dp" if layout.dp > 1 else "layout.fsdp"
        rest = degree // getattr(layout, key.split(".")[1])
        near = nearest(degree // rest, lambda n: lanes % (n * rest) == 0, high=lanes)
        rule = f"does not share {lanes} lanes evenly ({ranks}), and ranks that {why} own equally many"
        yield problem(recipe, "exact-lanes-even", key, rule, near)


def only_what_keeps_bits(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """What was not shown to keep its bits is refused."""
    device = recipe.run.device if recipe.run.device != "auto" else machine.device
    if device == "cuda":
        rule = "is refused: exact mode is shown on CPUs alone"
        yield problem(recipe, "exact-device", "run.device", rule, ["cpu"])
    if recipe.run.compile:
        rule = "lets a compiler choose the order of sums, which exact mode keeps"
        yield problem(recipe, "exact-compile", "run.compile", rule, [False])
    if recipe.optimizer.implementation == "fused":
        rule = "has bits that depend on how a tensor is cut"
        yield problem(recipe, "exact-optimizer", "optimizer.implementation", rule, ["auto", "foreach"])
    if recipe.model.num_mtp_layers:
        rule = "sums an embedding's gradient over more uses than exact mode keeps apart"
        yield problem(recipe, "exact-mtp", "model.num_mtp_layers", rule, [0])


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _in_exact_mode(rule):
    def judged(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
        if recipe.numerics.mode == "exact":
            yield from rule(recipe, machine)

    judged.__doc__ = rule.__doc__
    return judged


EXACT_RULES = tuple(
    _in_exact_mode(rule)
    for rule in (
        lanes_are_a_power_of_two,
        lanes_hold_whole_micro_batches,
        every_rank_has_a_lane,
        only_what_keeps_bits,
        *PIECE_RULES,
    )
)
