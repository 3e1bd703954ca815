"""What a check for silent data corruption cannot follow, and so would take for corruption."""

from collections.abc import Iterator

from drumline.recipe.problem import Problem, problem
from drumline.recipe.rules.machine import Machine
from drumline.recipe.sections import Recipe


def replay_repeats_bits(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A second run must have the bits of the first, and each operator must be seen."""
    if not recipe.resilience.replay_every:
        return
    if not recipe.numerics.deterministic:
        rule = (
            "lets operators change their bits from run to run, which resilience.replay_every would take for corruption"
        )
        yield problem(recipe, "replay-deterministic", "numerics.deterministic", rule, [True])
    if recipe.run.compile:
        rule = "hides operators from resilience.replay_every, which compares each"
        yield problem(recipe, "replay-compile", "run.compile", rule, [False])
    device = recipe.run.device if recipe.run.device != "auto" else machine.device
    if recipe.model.attention == "flex" or (recipe.model.attention == "auto" and device == "cuda"):
        rule = "compiles attention on CUDA, which hides it from resilience.replay_every"
        yield problem(recipe, "replay-flex", "model.attention", rule, ["sdpa"])
    if recipe.model.moe is not None and recipe.model.moe.capacity_factor:
        rule = "leaves rows of dropped tokens unwritten, which resilience.replay_every would take for corruption"
        yield problem(recipe, "replay-capacity", "model.moe.capacity_factor", rule, [0.0])


REPLAY_RULES = (replay_repeats_bits,)
