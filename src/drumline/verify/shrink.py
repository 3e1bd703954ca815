"""A recipe made small, for layouts to be tried on local ranks, without losing what a layout can trip over.

Every size becomes the smallest that answers the same questions in the same way as the full one does: does tp divide the
heads, are there fewer key/value heads than ranks, is a stage longer than another, what does tp leave of the vocabulary?
The full size answers its own questions, so there is always one. What is legal stays legal, and what is not stays not.
Pure; imports no torch.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from drumline.recipe.lanes import num_blocks
from drumline.recipe.layout import Layout, can_deal_heads
from drumline.recipe.sections import Model, Recipe, Section

HEAD_DIM, SMALLEST_WIDTH, SMALLEST_VOCABULARY, SMALLEST_SEQUENCE = 8, 32, 67, 32
NUM_MICRO_BATCHES = 2
"""At least so many micro-batches a rank, so that accumulation takes part."""

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Shrunk:
    """A recipe made small.

    Attributes:
        recipes: one a layout; they differ in the layout and in how the one global batch is cut.
        kept: what was kept, a line each.
    """

    recipes: tuple[Recipe, ...]
    kept: tuple[str, ...]


def shrink(recipe: Recipe, layouts: Sequence[Layout]) -> Shrunk:
    """Makes a recipe small.

    Args:
        recipe: of any size.
        layouts: that it is to be tried in; legal for it.

    Returns:
        The small recipes, and what was kept.
    """
    model = _small_model(recipe, layouts)
    seq_len = _smallest(
        recipe.data.seq_len,
        SMALLEST_SEQUENCE,
        lambda T: [_cuts_of_sequence(T, layout) for layout in layouts] + [T % _chunks(recipe) == 0],
    )
    small = _replace(
        recipe,
        model=model,
        data=_replace(recipe.data, seq_len=seq_len),
        memory=_replace(
            recipe.memory,
            every_n=min(recipe.memory.every_n, max(1, model.num_layers - 1)),
            loss_chunk_tokens=min(recipe.memory.loss_chunk_tokens, seq_len + seq_len // 2),
        ),
    )
    small = steady(small)
    batch = common_batch(layouts)
    recipes = tuple(with_batch(_replace(small, layout=layout), batch) for layout in layouts)
    return Shrunk(recipes, tuple(_kept(recipe, small, layouts)))


def steady(recipe: Recipe) -> Recipe:
    """The recipe with values that make numbers comparable and faults visible.

    Weights are of the size that keeps activations near 1, gradients are clipped, AdamW's epsilon is far above the
    rounding of gradients (below it a first step is the sign of a gradient, and the sign of rounding where there is no
    more), the learning rate is constant and moves weights well.
    """
    model = _replace(recipe.model, init_std=1.0 / math.sqrt(recipe.model.dim))
    optimizer = _replace(
        recipe.optimizer,
        lr=0.01,
        eps=1e-3,
        max_grad_norm=0.5 if recipe.optimizer.max_grad_norm else 0.0,
    )
    run = _replace(recipe.run, device="cpu", compile=False, steps=3, threads=1, profile="")
    data = _replace(recipe.data, sources=({"path": "made-up"},))  # no text is read, so no tokenizer is wanted
    return _replace(recipe, model=model, optimizer=optimizer, run=run, data=data)


def choosing_all(recipe: Recipe) -> Recipe:
    """The recipe with every token sent to all experts: in bf16 a choice may flip, and what follows is another model."""
    moe = recipe.model.moe
    assert moe is not None
    every = _replace(moe, experts_per_token=moe.num_experts, groups_per_token=moe.num_expert_groups)
    return _replace(recipe, model=_replace(recipe.model, moe=every))


def with_batch(recipe: Recipe, global_batch: int) -> Recipe:
    """The recipe with a global batch, cut into the micro-batches that its layout wants."""
    layout = recipe.layout
    micro = max(1, global_batch // layout.data_degree // _micro_batches(layout))
    return _replace(recipe, data=_replace(recipe.data, global_batch=global_batch, micro_batch=micro))


def common_batch(layouts: Sequence[Layout]) -> int:
    """The smallest global batch, from 8 on, that all layouts can cut."""
    batch = math.lcm(*(layout.data_degree * _micro_batches(layout) for layout in layouts))
    return batch * -(-8 // batch)


def _micro_batches(layout: Layout) -> int:
    """Pipelines need as many as they are deep, twice that where both ends are on one rank."""
    return NUM_MICRO_BATCHES if layout.pp == 1 else 2 * layout.pp


def _small_model(recipe: Recipe, layouts: Sequence[Layout]) -> Model:
    full, blocks = recipe.model, num_blocks(recipe)
    heads, kv_heads = _smallest_heads(full, layouts, blocks)
    fewest_layers = 2
    changes: dict[str, Any] = {}
    if full.moe is not None:
        moe = full.moe
        groups = moe.num_expert_groups
        fewest = 4 if groups == 1 else 2 * groups  # a group is judged by its two best
        E = _smallest(moe.num_experts, fewest, lambda n: [n % layout.ep == 0 for layout in layouts] + [n % groups == 0])
        of_group, chosen = E // moe.num_expert_groups, moe.experts_per_token
        most = moe.groups_per_token * of_group if moe.num_expert_groups > 1 else E
        if chosen < moe.num_experts:
            most = min(most, E - 1)
        num_dense = min(moe.num_dense_layers, 1)
        fewest_layers += num_dense
        changes["moe"] = _replace(
            moe,
            num_experts=E,
            experts_per_token=min(chosen, most),
            num_dense_layers=num_dense,
            num_shared_experts=min(moe.num_shared_experts, 2),
            expert_hidden_dim=_smallest_hidden(moe.expert_hidden_dim, layouts, blocks),
        )
    if full.mla is not None:
        mla, rope, nope = full.mla, min(full.mla.qk_rope_head_dim, HEAD_DIM), min(full.mla.qk_nope_head_dim, HEAD_DIM)
        is_narrower = mla.v_head_dim < full.head_dim
        changes["head_dim"] = rope + nope
        changes["mla"] = _replace(
            mla,
            q_lora_rank=min(mla.q_lora_rank, 2 * HEAD_DIM),
            kv_lora_rank=min(mla.kv_lora_rank, 2 * HEAD_DIM),
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=min(mla.v_head_dim, nope if is_narrower else nope + rope),
        )
    return _replace(
        full,
        num_mtp_layers=min(full.num_mtp_layers, 1),
        num_layers=_smallest(
            full.num_layers, fewest_layers, lambda n: [_cuts_of_layers(n, layout) for layout in layouts]
        ),
        dim=_smallest(full.dim, SMALLEST_WIDTH, lambda n: [n % 8 == 0] + [n % layout.tp == 0 for layout in layouts]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        hidden_dim=_smallest_hidden(full.hidden_dim, layouts, blocks),
        vocab_size=_smallest(
            full.vocab_size,
            SMALLEST_VOCABULARY,
            lambda n: [n % layout.tp for layout in layouts] + [(blocks - 1) * -(-n // blocks) < n],
        ),
        **{"head_dim": min(full.head_dim, HEAD_DIM), **changes},
    )


def _smallest_heads(full: Model, layouts: Sequence[Layout], blocks: int) -> tuple[int, int]:
    def answers(heads: int, kv_heads: int, width: int) -> Hashable:
        return (
            heads == kv_heads,
            kv_heads == 1,
            (heads * width % blocks == 0, kv_heads * width % blocks == 0),
            *(
                (
                    heads % layout.tp == 0,
                    kv_heads % layout.tp == 0,
                    can_deal_heads(max(1, heads // layout.tp), max(1, kv_heads // layout.tp), layout.ulysses_degree),
                    kv_heads < layout.tp * layout.ulysses_degree,
                    math.gcd(blocks, kv_heads) % (layout.tp * layout.ulysses_degree) == 0,
                )
                for layout in layouts
            ),
        )

    wanted, width = answers(full.num_heads, full.num_kv_heads, full.head_dim), min(full.head_dim, HEAD_DIM)
    for heads in range(min(4, full.num_heads), full.num_heads):
        for kv_heads in range(1, heads + 1):
            if heads % kv_heads == 0 and answers(heads, kv_heads, width) == wanted:
                return heads, kv_heads
    return full.num_heads, full.num_kv_heads


def _smallest_hidden(size: int, layouts: Sequence[Layout], blocks: int) -> int:
    # 16 bytes of bf16 are 8 elements, which grouped products need of a rank's rows.
    return _smallest(
        size,
        SMALLEST_WIDTH,
        lambda n: [n % 8 == 0, n % blocks == 0] + [(n % layout.tp, n // layout.tp % 8 == 0) for layout in layouts],
    )


def _chunks(recipe: Recipe) -> int:
    """Fixed chunks of a sequence in exact mode."""
    return 2 * num_blocks(recipe) if num_blocks(recipe) > 1 else 1


def _cuts_of_layers(num_layers: int, layout: Layout) -> Hashable:
    stages = num_stages(layout)
    return num_layers >= stages, num_layers % stages, num_layers > stages


def num_stages(layout: Layout) -> int:
    """Stages of the pipeline on all ranks."""
    return getattr(layout, "num_stages", None) or layout.pp


def _cuts_of_sequence(seq_len: int, layout: Layout) -> Hashable:
    chunks = 2 * layout.cp if layout.cp > 1 else 1
    return seq_len % chunks == 0, seq_len // layout.cp % layout.tp == 0


def _smallest(size: int, low: int, answers: Callable[[int], Hashable | list]) -> int:
    """The smallest number from `low` on that gives the same answers as `size`; `size` itself where it is less."""
    wanted = answers(size)
    return next((n for n in range(low, size) if answers(n) == wanted), size)


def _replace(section: S, **changes: Any) -> S:
    """The section with other values, validated as if they had been typed."""
    return type(section).model_validate(section.model_dump() | _dumped(changes))


def _dumped(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value.model_dump() if hasattr(value, "model_dump") else value for name, value in changes.items()}


def _kept(full: Recipe, small: Recipe, layouts: Sequence[Layout]) -> list[str]:
    """What changed, and what about it did not."""
    tp = sorted({layout.tp for layout in layouts} - {1})
    ep = sorted({layout.ep for layout in layouts} - {1})
    lines = [
        _line(full, small, "num_layers", [f"{full.model.num_layers % n} over" for n in _degrees(layouts, num_stages)]),
        _line(full, small, "num_heads", [f"query heads {_split(full.model.num_heads, n)} by tp{n}" for n in tp]),
        _line(full, small, "num_kv_heads", [_heads_kind(small.model)]),
        _line(full, small, "vocab_size", [f"remainder {full.model.vocab_size % n} by tp{n}" for n in tp]),
        _line(full, small, "hidden_dim", [f"remainder {full.model.hidden_dim % n} by tp{n}" for n in tp]),
        _line(full, small, "dim", []),
    ]
    if full.model.moe is not None and small.model.moe is not None:
        a, b = full.model.moe, small.model.moe
        kept = [f"{_split(a.num_experts, n)} by ep{n}" for n in ep]
        lines.append(_words("num_experts", a.num_experts, b.num_experts, kept))
        lines.append(_words("experts_per_token", a.experts_per_token, b.experts_per_token, []))
    kept = [_split(full.data.seq_len, 2 * n) + f" into 2 x cp{n}" for n in _degrees(layouts, lambda x: x.cp)]
    lines.append(_words("seq_len", full.data.seq_len, small.data.seq_len, kept))
    return lines


def _degrees(layouts: Sequence[Layout], degree: Callable[[Layout], int]) -> list[int]:
    return sorted({degree(layout) for layout in layouts} - {1})


def _line(full: Recipe, small: Recipe, name: str, kept: list[str]) -> str:
    return _words(name, getattr(full.model, name), getattr(small.model, name), kept)


def _words(name: str, before: int, after: int, kept: list[str]) -> str:
    return f"{name} {before:,} -> {after:,}" + (f" (kept: {', '.join(kept)})" if kept else "")


def _split(size: int, degree: int) -> str:
    return "divided" if size % degree == 0 else f"not divided ({size % degree} over)"


def _heads_kind(model: Model) -> str:
    if model.num_kv_heads == model.num_heads:
        return "a key/value head for each query head"
    return "one key/value head" if model.num_kv_heads == 1 else "query heads share key/value heads"
