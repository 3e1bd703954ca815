"""Rules of exact mode's fixed pieces: blocks of every width, chunks of every sequence, and what is not made of them."""

import math
from collections.abc import Iterator

from drumline.recipe.layout import SPLIT_SCHEDULES
from drumline.recipe.nearest import nearest, nearest_multiples
from drumline.recipe.problem import Problem, override, problem
from drumline.recipe.rules.machine import Machine
from drumline.recipe.sections import Recipe


def blocks_are_for_exact_mode(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Elsewhere products are computed whole."""
    mode = recipe.numerics.mode
    if mode != "exact" and recipe.numerics.blocks > 1:
        rule = f"is for numerics.mode = 'exact', not for {mode!r}"
        yield problem(recipe, "exact-blocks-mode", "numerics.blocks", rule, [1])


def whole_products_have_one_rank(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Plain products are one sum each, whose bits change when ranks share it out."""
    layout, blocks = recipe.layout, recipe.numerics.blocks
    if blocks > 1:
        return
    for axis, what in (("tp", "a matmul"), ("cp", "a sequence"), ("ep", "the experts")):
        if getattr(layout, axis) > 1:
            rule = f"shares out {what}, which exact mode computes whole with numerics.blocks = {blocks}"
            wanted = _power_of_two_from(getattr(layout, axis) if axis != "ep" else 2)
            yield problem(recipe, "exact-products", f"layout.{axis}", rule, [1], override("numerics.blocks", wanted))


def blocks_cut_the_model(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Every width that a product has is a whole number of blocks; a vocabulary is padded."""
    model, blocks = recipe.model, recipe.numerics.blocks
    if blocks == 1:
        return
    widths = {
        "heads": ("model.num_heads x head_dim", model.num_heads * model.head_dim),
        "kv-heads": ("model.num_kv_heads x head_dim", model.num_kv_heads * model.head_dim),
        "hidden": ("model.hidden_dim", model.hidden_dim),
    }
    if model.moe is not None:
        if model.moe.num_dense_layers == 0:
            del widths["hidden"]
        widths["expert-hidden"] = ("model.moe.expert_hidden_dim", model.moe.expert_hidden_dim)
    common = math.gcd(*(width for _, width in widths.values()))

    def fits(count: int) -> bool:
        return count & (count - 1) == 0 and common % count == 0 and _last_has_rows(model.vocab_size, count)

    near = nearest(blocks, fits, high=blocks)
    for name, (key, width) in widths.items():
        if width % blocks:
            rule = f"does not cut {key} = {width} into equal blocks"
            yield problem(recipe, f"exact-blocks-{name}", "numerics.blocks", rule, near)
    if not _last_has_rows(model.vocab_size, blocks):
        rule = f"cuts model.vocab_size = {model.vocab_size} into blocks of which the last would be empty"
        yield problem(recipe, "exact-blocks-vocabulary", "numerics.blocks", rule, near)


def chunks_cut_the_sequence(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A sequence is twice as many chunks as there are blocks."""
    seq_len, blocks = recipe.data.seq_len, recipe.numerics.blocks
    if blocks > 1 and seq_len % (2 * blocks):
        rule = f"is not cut into 2 x numerics.blocks = {2 * blocks} equal chunks"
        near = nearest_multiples(2 * blocks, seq_len)
        yield problem(recipe, "exact-chunks-seq", "data.seq_len", rule, near)


def ranks_hold_whole_pieces(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A rank has an aligned run of the blocks and of the chunks."""
    layout, blocks = recipe.layout, recipe.numerics.blocks
    if blocks == 1:
        return
    fits = True
    for axis in ("tp", "cp"):
        degree = getattr(layout, axis)
        if blocks % degree:
            fits = False
            wanted = _power_of_two_from(max(degree, blocks)) if degree & (degree - 1) == 0 else 0
            remedy = override("numerics.blocks", wanted) if wanted else ""
            rule = f"does not divide numerics.blocks = {blocks}"
            near = nearest(degree, lambda n: blocks % n == 0, high=blocks)
            yield problem(recipe, f"exact-{axis}-blocks", f"layout.{axis}", rule, near, remedy)
    own_chunks = 2 * blocks // layout.cp
    if fits and layout.sequence_parallel and own_chunks % layout.tp:
        rule = f"does not share out a rank's {own_chunks} chunks, 2 x numerics.blocks = {2 * blocks} / layout.cp"
        near = nearest(layout.tp, lambda n: own_chunks % n == 0, high=own_chunks)
        remedy = override("numerics.blocks", layout.tp * layout.cp // 2)
        yield problem(recipe, "exact-tp-chunks", "layout.tp", rule, near, remedy)


def ulysses_deals_whole_groups(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Ulysses ranks take groups of heads, whose number the recipe fixes."""
    layout, groups = recipe.layout, math.gcd(recipe.numerics.blocks, recipe.model.num_kv_heads)
    degree = layout.ulysses_degree
    if recipe.numerics.blocks > 1 and degree > 1 and groups % (degree * layout.tp):
        rule = f"cannot deal {groups} fixed groups of heads (what divides numerics.blocks and model.num_kv_heads) to "
        rule += f"{degree} ranks x layout.tp = {layout.tp}; 'ring' needs none"
        yield problem(recipe, "exact-ulysses-groups", "layout.cp_method", rule, ["ring", "gather"])


def experts_get_whole_sequences(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Ranks that share out experts have all chunks of their sequences among them."""
    layout = recipe.layout
    if recipe.numerics.blocks == 1 or layout.ep == 1:
        return
    if layout.ep % layout.cp:
        rule = f"leaves chunks of a sequence to other ranks: a multiple of layout.cp = {layout.cp} has all of them"
        near = nearest(layout.ep, lambda n: n % layout.cp == 0, high=layout.cp * layout.fsdp)
        yield problem(recipe, "exact-ep-cp", "layout.ep", rule, near)
    if layout.pp > 1 and layout.pp_schedule in SPLIT_SCHEDULES:
        rule = f"runs the backward in two parts, where layout.ep = {layout.ep} puts gradients down in one"
        yield problem(recipe, "exact-ep-schedule", "layout.pp_schedule", rule, ["1f1b"])


def only_what_is_made_of_pieces(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """What has no form in fixed pieces is refused."""
    model, blocks = recipe.model, recipe.numerics.blocks
    if blocks == 1:
        return
    behind = f"is not computed in fixed pieces, numerics.blocks = {blocks}"
    if model.mla is not None:
        yield problem(recipe, "exact-mla", "model.mla", behind, ["none"])
    if model.attention != "auto":
        rule = f"is not what computes attention in fixed tiles, numerics.blocks = {blocks}"
        yield problem(recipe, "exact-attention", "model.attention", rule, ["auto"])
    if model.moe is not None and model.moe.capacity_factor > 0:
        yield problem(recipe, "exact-capacity", "model.moe.capacity_factor", behind, [0.0])
    if recipe.layout.tp_async:
        yield problem(recipe, "exact-tp-async", "layout.tp_async", f"cuts products otherwise: it {behind}", [False])
    if recipe.memory.activation_checkpointing == "selective":
        rule = f"keeps whole products, which numerics.blocks = {blocks} cuts into pieces"
        key = "memory.activation_checkpointing"
        yield problem(recipe, "exact-selective", key, rule, ["full", "every_n", "none"])


def _last_has_rows(vocab_size: int, blocks: int) -> bool:
    return (blocks - 1) * -(-vocab_size // blocks) < vocab_size


def _power_of_two_from(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


PIECE_RULES = (
    whole_products_have_one_rank,
    blocks_cut_the_model,
    chunks_cut_the_sequence,
    ranks_hold_whole_pieces,
    ulysses_deals_whole_groups,
    experts_get_whole_sequences,
    only_what_is_made_of_pieces,
)
"""Of recipes in exact mode."""
