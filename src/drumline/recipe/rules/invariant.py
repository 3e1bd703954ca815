"""Where a model of invariant operators cannot be had: each rule names the key that stands in its way."""

from collections.abc import Iterator

from drumline.recipe.problem import Problem, problem
from drumline.recipe.rules.machine import Machine
from drumline.recipe.sections import Recipe

_CODE = "invariant"


def only_dense_models_are_invariant(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Experts, latent attention and further tokens have operators of which no invariant form is there."""
    model = recipe.model
    if not recipe.numerics.invariant:
        return
    parts = {"model.moe": model.moe, "model.mla": model.mla, "model.num_mtp_layers": model.num_mtp_layers}
    found = [key for key, value in parts.items() if value]
    if found:
        rule = f"is for dense models, but the recipe has {', '.join(found)}"
        yield problem(recipe, _CODE, "numerics.invariant", rule, [False])


def invariant_models_are_not_split(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Splitting a model, or a sequence, cuts sums that are then added in another order."""
    if not recipe.numerics.invariant:
        return
    for axis in ("tp", "cp", "pp", "ep"):
        if getattr(recipe.layout, axis) > 1:
            rule = "splits the model, but numerics.invariant = true runs whole models: dp and fsdp"
            yield problem(recipe, _CODE, f"layout.{axis}", rule, [1])


def invariant_operators_run_as_they_are(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Nothing else may choose what computes: no compiler, no other attention, no GPU, no other mode of numerics."""
    if not recipe.numerics.invariant:
        return
    if recipe.run.compile:
        rule = "lets a compiler choose the order of sums, but numerics.invariant = true fixes it"
        yield problem(recipe, _CODE, "run.compile", rule, [False])
    if recipe.model.attention not in ("auto", "kernel"):
        rule = "is not drumline's own attention, which numerics.invariant = true needs"
        yield problem(recipe, _CODE, "model.attention", rule, ["auto"])
    if recipe.numerics.mode != "default":
        rule = "has operators of its own; numerics.invariant = true goes with default"
        yield problem(recipe, _CODE, "numerics.mode", rule, ["default"])
    device = recipe.run.device if recipe.run.device != "auto" else machine.device
    if device == "cuda":
        rule = "is not where invariant operators train models yet; numerics.invariant = true needs cpu"
        yield problem(recipe, _CODE, "run.device", rule, ["cpu"])


INVARIANT_RULES = (
    only_dense_models_are_invariant,
    invariant_models_are_not_split,
    invariant_operators_run_as_they_are,
)
