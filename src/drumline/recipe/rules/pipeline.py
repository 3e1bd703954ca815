"""Rules of pipeline parallelism: the schedule is there, it has so many stages a rank, and each stage has a layer."""

import difflib
from collections.abc import Iterator

from drumline.recipe.layout import FEWEST_STAGES, SCHEDULE_STAGES, SPLIT_SCHEDULES, V_SCHEDULES
from drumline.recipe.problem import Problem, override, problem
from drumline.recipe.rules.machine import Machine
from drumline.recipe.sections import Recipe


def schedule_has_a_name(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A schedule is known by name, or is a CSV file."""
    name = recipe.layout.pp_schedule
    if name in SCHEDULE_STAGES or name.endswith(".csv"):
        return
    near = difflib.get_close_matches(name.lower(), SCHEDULE_STAGES, n=3, cutoff=0.4)
    rule = f"is no pipeline schedule: one of {', '.join(SCHEDULE_STAGES)}, or a file that ends with .csv"
    yield problem(recipe, "layout-pp-schedule", "layout.pp_schedule", rule, near or ["1f1b"])


def schedule_has_these_stages(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A rank has as many stages as its schedule is made for."""
    layout = recipe.layout
    name, virtual = layout.pp_schedule, layout.pp_virtual
    if virtual == 0 or layout.pp == 1 or name not in SCHEDULE_STAGES:
        return
    needed = SCHEDULE_STAGES[name]
    if needed is not None and virtual != needed:
        others = [
            other
            for other, stages in SCHEDULE_STAGES.items()
            if stages == virtual or (stages is None and virtual >= FEWEST_STAGES)
        ]
        also = f"; with {virtual} there are {', '.join(others)}" if others else ""
        rule = f"is not what layout.pp_schedule = {name!r} needs, {needed} a rank{also}"
        yield problem(recipe, "layout-pp-virtual", "layout.pp_virtual", rule, [0])
    elif needed is None and virtual < FEWEST_STAGES:
        rule = f"leaves layout.pp_schedule = {name!r} nothing to interleave"
        yield problem(recipe, "layout-pp-virtual", "layout.pp_virtual", rule, [FEWEST_STAGES])


def every_stage_has_a_layer(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Every pipeline stage has at least one block."""
    layout, layers = recipe.layout, recipe.model.num_layers
    stages = layout.num_stages or layout.pp
    if stages <= layers:
        return
    virtual = stages // layout.pp
    if virtual == 1:
        rule = f"makes more stages than model.num_layers = {layers} has blocks"
        yield problem(recipe, "layout-pp-layers", "layout.pp", rule, [layers])
        return
    rule = f"makes {stages} stages, {virtual} on each rank, of model.num_layers = {layers} blocks: one each at least"
    fits = layers // virtual
    remedy = "" if fits > 1 else override("layout.pp_schedule", "1f1b")
    yield problem(recipe, "layout-pp-layers", "layout.pp", rule, [fits] if fits > 1 else [], remedy)


def split_backward_is_not_compiled(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A compiled block has one backward, which cannot be cut in two."""
    layout = recipe.layout
    if layout.pp > 1 and recipe.run.compile and layout.pp_schedule in SPLIT_SCHEDULES:
        rule = f"makes a block's backward one piece, which layout.pp_schedule = {layout.pp_schedule!r} runs in two"
        yield problem(recipe, "layout-pp-compile", "run.compile", rule, [False])


def split_backward_is_not_recomputed_by_operator(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """torch's selective checkpointing gives up what it keeps at the first backward; a split one comes back for more."""
    layout, key = recipe.layout, "memory.activation_checkpointing"
    if (
        layout.pp > 1
        and layout.pp_schedule in SPLIT_SCHEDULES
        and recipe.memory.activation_checkpointing == "selective"
    ):
        rule = f"keeps results for one backward, which layout.pp_schedule = {layout.pp_schedule!r} runs in two parts"
        yield problem(recipe, "layout-pp-selective", key, rule, ["full", "every_n", "none"])


def tied_embedding_is_not_sharded_twice(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """FSDP shards a stage's parameters, and a parameter of two stages of one rank has two owners."""
    layout = recipe.layout
    if layout.pp > 1 and layout.fsdp > 1 and recipe.model.shares_embedding and layout.pp_schedule in V_SCHEDULES:
        rule = (
            f"puts the first and the last stage on one rank, where layout.fsdp = {layout.fsdp} cannot shard the "
            "embedding that they share (model.tie_embeddings, model.num_mtp_layers)"
        )
        yield problem(recipe, "layout-pp-tied", "layout.pp_schedule", rule, ["zb-h1", "1f1b"])


PIPELINE_RULES = (
    schedule_has_a_name,
    schedule_has_these_stages,
    every_stage_has_a_layer,
    split_backward_is_not_compiled,
    split_backward_is_not_recomputed_by_operator,
    tied_embedding_is_not_sharded_twice,
)
