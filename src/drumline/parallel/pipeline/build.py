"""From a layout to a pipeline: which stages this rank holds, and how they are joined again.

Every data-parallel replica of a stage runs the same schedule, so that the ranks that share its gradients meet in the
same order.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from drumline.models import Part
from drumline.parallel.apply import own_gradients
from drumline.parallel.gradients import Gradients, Several
from drumline.parallel.mesh import Mesh
from drumline.parallel.pipeline.execute import Pipeline
from drumline.parallel.pipeline.model import TIED, Stages, TiedAcrossRanks
from drumline.parallel.pipeline.stage import Stage
from drumline.parallel.place import Place, Places
from drumline.planner import stage_layers
from drumline.recipe.errors import DrumlineError
from drumline.recipe.lanes import Lanes
from drumline.recipe.layout import Layout
from drumline.recipe.sections import Model, Recipe
from drumline.schedules import SCHEDULES, Schedule, check, generate, read_file


def choose_schedule(layout: Layout, num_microbatches: int) -> Schedule:
    """The schedule that a layout names.

    Args:
        layout: pp, pp_schedule and pp_virtual are read.
        num_microbatches: of a step.

    Returns:
        The schedule, which is sound.

    Raises:
        DrumlineError: the file cannot be read, is for other numbers, or has faults.
    """
    name = layout.pp_schedule
    if name in SCHEDULES:
        return generate(name, layout.pp, num_microbatches, layout.pp_virtual or None)
    schedule = read_file(Path(name))
    check(schedule)
    own = (schedule.num_ranks, schedule.num_microbatches)
    wanted = (layout.pp, num_microbatches)
    for noun, found, asked in zip(("ranks", "micro-batches"), own, wanted, strict=True):
        if found != asked:
            raise DrumlineError(
                f"layout.pp_schedule = {name!r} is for {found} {noun}, but the run has {asked}"
                + (f"\n  try: layout.pp={found}" if noun == "ranks" else "\n  try: another data.global_batch")
            )
    if layout.pp_virtual and layout.pp_virtual * layout.pp != schedule.num_stages:
        raise DrumlineError(
            f"layout.pp_virtual = {layout.pp_virtual}, but {name} has {schedule.num_stages} stages on {layout.pp} ranks"
            "\n  try: layout.pp_virtual=0"
        )
    return schedule


def cut(recipe: Recipe, rank: int, num_microbatches: int) -> tuple[Schedule, dict[int, Part]]:
    """Cuts the model into the stages of a layout.

    Args:
        recipe: layout, model and data.seq_len are read.
        rank: of this process in the pipeline.
        num_microbatches: of a step.

    Returns:
        The schedule of a step, and this rank's stages by their index along the model.

    Raises:
        DrumlineError: the schedule cannot be used, or has more stages than the model has layers.
    """
    model, layout = recipe.model, recipe.layout
    schedule = choose_schedule(layout, num_microbatches)
    if schedule.num_stages > model.num_layers:
        raise DrumlineError(
            f"layout.pp_schedule = {layout.pp_schedule!r} has {schedule.num_stages} stages, but model.num_layers = "
            f"{model.num_layers}: every stage holds at least one layer"
        )
    if recipe.run.compile and schedule.is_split:
        raise DrumlineError(
            f"layout.pp_schedule = {layout.pp_schedule!r} runs a block's backward in two, which run.compile makes one "
            "piece\n  try: run.compile=false"
        )
    if recipe.memory.activation_checkpointing == "selective" and schedule.is_split:
        raise DrumlineError(
            f"layout.pp_schedule = {layout.pp_schedule!r} runs a block's backward in two parts, and "
            "memory.activation_checkpointing = 'selective' keeps results for one\n"
            "  try: memory.activation_checkpointing=full"
        )
    if model.shares_embedding and layout.fsdp > 1 and schedule.placement[0] == schedule.placement[-1]:
        raise DrumlineError(
            f"layout.pp_schedule = {layout.pp_schedule!r} puts the first and the last stage on one rank, where FSDP "
            "cannot shard the embedding that they share\n  try: layout.pp_schedule=1f1b, or dp in place of fsdp"
        )
    layers = stage_layers(model, recipe.data.seq_len, schedule.num_stages)
    return schedule, {
        stage: Part(layers[stage], has_embedding=stage == 0, has_output=stage == schedule.num_stages - 1)
        for stage in schedule.stages_of(rank)
    }


def joined_places(found: Sequence[Places], model: Model, placement: Sequence[int]) -> dict[str, Place]:
    """The places of all parameters of a rank's stages.

    Args:
        found: those of each stage.
        model: the model's section.
        placement: the pipeline's rank of each stage.

    Returns:
        By logical name; a tied embedding is also on the rank of the other stage that holds it.
    """
    places = {name: place for each in found for name, place in each.items()}
    holders = tuple(sorted({placement[0], placement[-1]}))
    if model.shares_embedding and TIED in places and len(holders) > 1:
        place = places[TIED]
        places[TIED] = Place(place.shape, place.offsets, place.copied, place.partial, holders)
    return places


def own_stage_gradients(
    model: Stages,
    mesh: Mesh,
    places: Places,
    placement: Sequence[int],
    *,
    is_tied: bool,
    lanes: Lanes | None = None,
) -> tuple[Gradients, list[Gradients]]:
    """Chooses what brings the gradients of each stage to their sum, and those of a tied embedding.

    Args:
        model: this rank's stages, materialized.
        mesh: of the layout.
        places: of their parameters.
        placement: the pipeline's rank of each stage.
        is_tied: the first and the last stage share the embedding.
        lanes: of a run in exact mode.

    Returns:
        The gradients of all stages, and of each.
    """
    seen: set[nn.Parameter] = set()
    each = []
    for stage in model:
        each.append(own_gradients(stage, mesh, places, lanes=lanes, apart_from=frozenset(seen)))
        seen |= set(stage.parameters())
    rank, group = mesh.coordinate("pp"), mesh.group("pp")
    holders = [placement[0], placement[-1]]
    if not is_tied or rank not in holders or holders[0] == holders[1] or group is None:
        return Several(each), each
    weight = dict(model.named_parameters())[TIED]
    other = holders[1] if rank == holders[0] else holders[0]
    peers = mesh.ranks_along("pp")
    return TiedAcrossRanks(each, weight, rank=rank, other=other, peers=peers, group=group), each


def make_pipeline(
    parts: Mapping[int, nn.Module],
    gradients: Sequence[Gradients],
    mesh: Mesh,
    *,
    schedule: Callable[[int], Schedule],
    placement: tuple[int, ...],
    hidden: tuple[int, torch.dtype],
) -> Pipeline:
    """Joins this rank's stages to a pipeline.

    Args:
        parts: this rank's stages by their index along the model.
        gradients: of each.
        mesh: of the layout.
        schedule: makes the schedule of a step of so many micro-batches.
        placement: the pipeline's rank of each stage.
        hidden: (dim, dtype) of what goes from stage to stage.

    Returns:
        The pipeline.
    """
    stages = {index: Stage(part, own) for (index, part), own in zip(parts.items(), gradients, strict=True)}
    return Pipeline(
        stages=stages,
        schedule=schedule,
        placement=placement,
        rank=mesh.coordinate("pp"),
        peers=mesh.ranks_along("pp"),
        group=mesh.group("pp"),
        hidden=hidden,
        token_shares=mesh.layout.tp if mesh.layout.sequence_parallel else 1,
    )
