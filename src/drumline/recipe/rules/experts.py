"""Rules of a mixture of experts: what is chosen from must be there, and be enough.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2 (groups, shared experts).
"""

from collections.abc import Iterator

from drumline.recipe.nearest import nearest, nearest_multiples
from drumline.recipe.problem import Problem, problem
from drumline.recipe.rules.machine import Machine
from drumline.recipe.sections import Recipe

_SCORED_BY = 2  # sigmoid scoring judges a group by its two best experts


def choice_is_among_experts(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A token cannot be sent to more experts than there are."""
    moe = recipe.model.moe
    if moe is not None and moe.experts_per_token > moe.num_experts:
        rule = f"is more than model.moe.num_experts = {moe.num_experts}"
        yield problem(recipe, "moe-experts-per-token", "model.moe.experts_per_token", rule, [moe.num_experts])


def groups_divide_experts(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Groups are equal, and large enough to be judged."""
    moe = recipe.model.moe
    if moe is None or moe.num_expert_groups == 1:
        return
    groups, experts = moe.num_expert_groups, moe.num_experts
    smallest = _SCORED_BY if moe.scoring == "sigmoid" else 1
    near = nearest(groups, lambda n: experts % n == 0 and (n == 1 or experts // n >= smallest), high=experts)
    key = "model.moe.num_expert_groups"
    if experts % groups:
        yield problem(recipe, "moe-groups", key, f"does not divide model.moe.num_experts = {experts}", near)
    elif experts // groups < smallest:
        rule = f"leaves a group {experts // groups} expert, but sigmoid scoring judges it by its {_SCORED_BY} best"
        yield problem(recipe, "moe-group-size", key, rule, near)


def chosen_groups_hold_enough(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """The chosen groups are among the groups, and have the experts that a token needs."""
    moe = recipe.model.moe
    if moe is None or moe.num_experts % moe.num_expert_groups:
        return
    key, groups = "model.moe.groups_per_token", moe.num_expert_groups
    needed = -(-moe.experts_per_token // (moe.num_experts // groups))
    if moe.groups_per_token > groups:
        rule = f"is more than model.moe.num_expert_groups = {groups}"
        yield problem(recipe, "moe-groups-per-token", key, rule, [groups])
    elif moe.groups_per_token < needed <= groups:
        held = moe.groups_per_token * (moe.num_experts // groups)
        rule = f"groups hold {held} experts, fewer than model.moe.experts_per_token = {moe.experts_per_token}"
        yield problem(recipe, "moe-groups-too-few", key, rule, [needed])


def some_layer_has_experts(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A mixture of experts has at least one layer with experts."""
    moe, layers = recipe.model.moe, recipe.model.num_layers
    if moe is not None and moe.num_dense_layers >= layers:
        rule = f"leaves none of model.num_layers = {layers} to the experts"
        yield problem(recipe, "moe-dense-layers", "model.moe.num_dense_layers", rule, [layers - 1])


def gate_has_shared_experts(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """The gate scales what shared experts give."""
    moe = recipe.model.moe
    if moe is not None and moe.shared_expert_gate and not moe.num_shared_experts:
        rule = "gates shared experts, but model.moe.num_shared_experts = 0"
        yield problem(recipe, "moe-shared-gate", "model.moe.shared_expert_gate", rule, [False])


def compiled_experts_are_grouped(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """torch traces its grouped product in bf16 only, with rows of whole 16 bytes; the loop over experts reads counts,
    which breaks a graph.
    """
    model, moe = recipe.model, recipe.model.moe
    if moe is None or not recipe.run.compile:
        return
    if recipe.precision.compute != "bf16":
        rule = f"compiles experts, which torch traces in bf16 only, but precision.compute = {recipe.precision.compute}"
        yield problem(recipe, "compile-experts", "run.compile", rule, [False])
    for key, width in (("model.dim", model.dim), ("model.moe.expert_hidden_dim", moe.expert_hidden_dim)):
        if width % 8:
            rule = "is no multiple of 8, as run.compile needs of experts in bf16"
            yield problem(recipe, "compile-experts-width", key, rule, nearest_multiples(8, width))


def capacity_is_of_whole_sequences(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """What an expert has room for is counted over a sequence, of which a rank has a part under context parallelism, and
    under tensor parallelism with shares of tokens.
    """
    moe, layout = recipe.model.moe, recipe.layout
    if moe is None or not moe.capacity_factor:
        return
    for axis, cuts in (("cp", layout.cp > 1), ("tp", layout.tp > 1 and layout.sequence_parallel)):
        if cuts:
            degree = getattr(layout, axis)
            rule = f"counts an expert's room over whole sequences, which layout.{axis} = {degree} cuts; 0 drops nothing"
            yield problem(recipe, f"moe-capacity-{axis}", "model.moe.capacity_factor", rule, [0.0])


EXPERT_RULES = (
    choice_is_among_experts,
    groups_divide_experts,
    chosen_groups_hold_enough,
    some_layer_has_experts,
    gate_has_shared_experts,
    compiled_experts_are_grouped,
    capacity_is_of_whole_sequences,
)
