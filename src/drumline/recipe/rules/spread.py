"""Rules of the layout: which degrees divide what they split, and how many ranks they make."""

import math
from collections.abc import Iterator

from drumline.recipe.layout import AXES, MAX_DEGREE, MESH_AXES, Layout, can_deal_heads
from drumline.recipe.nearest import nearest
from drumline.recipe.problem import Problem, problem
from drumline.recipe.rules.machine import Machine
from drumline.recipe.sections import Recipe


def tp_divides_the_model(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Tensor parallelism splits heads, key/value heads and hidden widths; a vocabulary is padded."""
    tp, model = recipe.layout.tp, recipe.model
    split = {
        "heads": ("model.num_heads", model.num_heads),
        "kv-heads": ("model.num_kv_heads", model.num_kv_heads),
        "hidden": ("model.hidden_dim", model.hidden_dim),
    }
    if model.moe is not None:
        if model.moe.num_dense_layers == 0:
            del split["hidden"]
        split["expert-hidden"] = ("model.moe.expert_hidden_dim", model.moe.expert_hidden_dim)
    common = math.gcd(*(size for _, size in split.values()))
    for name, (key, size) in split.items():
        if size % tp:
            near = nearest(tp, lambda n: common % n == 0, high=common)  # values that all these rules accept
            yield problem(recipe, f"layout-tp-{name}", "layout.tp", f"does not divide {key} = {size}", near)


def tp_divides_the_tokens(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Under sequence parallelism, tensor-parallel ranks hold equal shares of a context-parallel rank's tokens."""
    layout, seq_len = recipe.layout, recipe.data.seq_len
    if layout.tp == 1 or not layout.sequence_parallel or seq_len % (layout.tp * layout.cp) == 0:
        return
    near = nearest(layout.tp, lambda n: n == 1 or seq_len % (n * layout.cp) == 0, high=max(1, seq_len // layout.cp))
    rule = f"does not share out the tokens of a rank, data.seq_len = {seq_len} / layout.cp = {layout.cp}"
    yield problem(recipe, "layout-tp-seq", "layout.tp", rule, near)


def chunks_are_shares_of_tokens(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """What goes around in chunks is the ranks' shares of the tokens."""
    if recipe.layout.tp_async and not recipe.layout.sequence_parallel:
        rule = "passes shares of tokens around, which layout.sequence_parallel = false does not make"
        yield problem(recipe, "layout-tp-async", "layout.tp_async", rule, [False])


def tp_is_not_compiled(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A compiled block is one graph, which communication between ranks would break."""
    if recipe.layout.tp > 1 and recipe.run.compile:
        rule = f"compiles a block whole, which the communication of layout.tp = {recipe.layout.tp} forbids"
        yield problem(recipe, "layout-tp-compile", "run.compile", rule, [False])


def cp_divides_the_sequence(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A context-parallel rank holds two chunks, one from each end, to balance causal attention."""
    cp, seq_len = recipe.layout.cp, recipe.data.seq_len
    if cp > 1 and seq_len % (2 * cp):
        near = nearest(cp, lambda n: n == 1 or seq_len % (2 * n) == 0, high=max(1, seq_len // 2))
        rule = f"does not cut data.seq_len = {seq_len} into 2 x cp equal chunks"
        yield problem(recipe, "layout-cp-seq", "layout.cp", rule, near)


def ulysses_groups_divide_cp(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Rings of Ulysses groups need groups of more than one rank that are not all of cp; nothing else has groups."""
    layout = recipe.layout
    if layout.cp_method == "ring_ulysses":
        if layout.cp > 1 and (layout.cp % layout.cp_ulysses or not 1 < layout.cp_ulysses < layout.cp):
            near = [n for n in range(2, layout.cp) if layout.cp % n == 0]
            rule = f"makes no rings of groups of layout.cp = {layout.cp}: it must divide cp, be more than 1, and less"
            yield problem(recipe, "layout-ulysses-groups", "layout.cp_ulysses", rule, near)
    elif layout.cp_ulysses > 1:
        rule = f"is for layout.cp_method = 'ring_ulysses', not for {layout.cp_method!r}"
        yield problem(recipe, "layout-ulysses-method", "layout.cp_ulysses", rule, [1])


def ulysses_deals_heads(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Ulysses ranks each take whole heads, and key/value heads that serve them."""
    layout, model = recipe.layout, recipe.model
    degree, heads, kv_heads = layout.ulysses_degree, model.num_heads // layout.tp, model.num_kv_heads // layout.tp
    if degree == 1 or layout.cp % degree or not heads or not kv_heads:
        return
    can_deal = [n for n in range(2, heads + 1) if can_deal_heads(heads, kv_heads, n)]
    if degree in can_deal:
        return
    key = "layout.cp" if layout.cp_method == "ulysses" else "layout.cp_ulysses"
    rule = f"cannot deal out {heads} query heads and {kv_heads} key/value heads; layout.cp_method = 'ring' takes any"
    yield problem(recipe, "layout-ulysses-heads", key, rule, can_deal)


def cp_is_not_compiled(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A compiled block is one graph, which communication between ranks would break."""
    if recipe.layout.cp > 1 and recipe.run.compile:
        rule = f"compiles a block whole, which the communication of layout.cp = {recipe.layout.cp} forbids"
        yield problem(recipe, "layout-cp-compile", "run.compile", rule, [False])


def ep_divides_the_experts(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Every expert-parallel rank holds the same number of experts; a dense model has none to spread."""
    ep, moe, layout = recipe.layout.ep, recipe.model.moe, recipe.layout
    if ep == 1:
        return
    if moe is None:
        rule = f"spreads experts, but {recipe.model.family} is a dense model"
        yield problem(recipe, "layout-ep-dense", "layout.ep", rule, [1])
        return
    lent = layout.fsdp * layout.cp
    near = nearest(ep, lambda n: lent % n == 0 and moe.num_experts % n == 0, high=moe.num_experts)
    if moe.num_experts % ep:
        rule = f"does not divide model.moe.num_experts = {moe.num_experts}"
        yield problem(recipe, "layout-ep-experts", "layout.ep", rule, near)
    if lent % ep:
        rule = f"does not divide the {lent} ranks that it borrows, layout.fsdp = {layout.fsdp} x cp = {layout.cp}"
        yield problem(recipe, "layout-ep-ranks", "layout.ep", rule, near)


def ep_is_not_compiled(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A compiled block is one graph; a dispatcher waits in it for how many tokens come."""
    if recipe.layout.ep > 1 and recipe.run.compile:
        rule = f"compiles a block whole, which the communication of layout.ep = {recipe.layout.ep} forbids"
        yield problem(recipe, "layout-ep-compile", "run.compile", rule, [False])


def sharded_experts_are_not_recomputed_by_operator(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """torch's selective checkpointing counts FSDP's operators, too, which differ where experts are gathered ahead."""
    layout = recipe.layout
    if layout.ep > 1 and layout.fsdp > 1 and recipe.memory.activation_checkpointing == "selective":
        rule = f"cannot run with sharded experts, layout.ep = {layout.ep} and layout.fsdp = {layout.fsdp}"
        key = "memory.activation_checkpointing"
        yield problem(recipe, "layout-ep-selective", key, rule, ["full", "every_n", "none"])


def layout_fills_the_world(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """The degrees multiply to the number of ranks that run."""
    layout, world = recipe.layout, machine.world_size
    if world is None or layout.num_ranks == world:
        return
    degrees = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in MESH_AXES if getattr(layout, axis) > 1)
    ranks = f"{layout.num_ranks} rank{'s' if layout.num_ranks > 1 else ''}"
    rule = f"is a layout of {ranks}{f' ({degrees})' if degrees else ''}, but the world has {world}"
    near = _layouts_of(world, recipe)
    remedy = f"layout={near[0]}" if near else ""
    yield Problem("layout-world", "layout", str(layout), rule, tuple(near), remedy)


def _layouts_of(world: int, recipe: Recipe) -> list[str]:
    """Layouts of `world` ranks, those that deal the batch evenly and are most like the recipe's first."""
    layout, data = recipe.layout, recipe.data
    model_ranks = layout.num_ranks // layout.data_degree
    kept = {axis: getattr(layout, axis) for axis in AXES}
    if world % model_ranks:
        kept |= {"pp": 1, "cp": 1, "tp": 1, "ep": 1}
        model_ranks = 1
    degree = world // model_ranks
    found = []
    for dp in (n for n in range(1, min(degree, 1 << 16) + 1) if degree % n == 0):
        fsdp = degree // dp
        if fsdp > MAX_DEGREE:
            continue
        uneven = data.global_batch % (degree * data.micro_batch) != 0
        distance = abs(math.log(dp / layout.dp)) + abs(math.log(fsdp / layout.fsdp))
        added = (layout.dp == 1 and dp > 1) + (layout.fsdp == 1 and fsdp > 1)  # an axis that was not asked for
        found.append((uneven, added, round(distance, 9), str(Layout(**{**kept, "dp": dp, "fsdp": fsdp}))))
    return [text for *_, text in sorted(found)[:3]]


SPREAD_RULES = (
    tp_divides_the_model,
    tp_divides_the_tokens,
    chunks_are_shares_of_tokens,
    tp_is_not_compiled,
    cp_divides_the_sequence,
    ulysses_groups_divide_cp,
    ulysses_deals_heads,
    cp_is_not_compiled,
    ep_divides_the_experts,
    ep_is_not_compiled,
    sharded_experts_are_not_recomputed_by_operator,
    layout_fills_the_world,
)
