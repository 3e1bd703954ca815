"""Which layouts `drumline verify --exact` holds against one rank bit for bit: the built-in table, or a recipe's own.

A row is named as in the other table, `dense/dp2.pp2 zbv bf16`; `OF_MODEL` adds what exact mode needs. A new way to
split the work adds rows here and, where its products are summed by blocks, the keys of a model that has them.
"""

from collections.abc import Sequence

from drumline.recipe import Layout, Recipe, RecipeError, load, problems
from drumline.verify.choose import Chosen, Refused, check_size
from drumline.verify.matrix import MODELS, Row, rows_of_table
from drumline.verify.run import Case
from drumline.verify.shrink import shrink, steady

LANES, MICROBATCHES_OF_A_LANE = 8, 3
"""Three micro-batches a lane, since two have the same sum in either order."""

_COMMON = (
    "numerics.mode=exact",
    f"numerics.lanes={LANES}",
    "data.micro_batch=1",
    f"data.global_batch={LANES * MICROBATCHES_OF_A_LANE}",
)
_PIECES = (*_COMMON, "numerics.blocks=4")
IN_PIECES = {f"{model}-pieces": model for model in ("dense", "tied", "uneven", "moe", "moe-shared")}
"""Models whose products are summed by blocks -> the model of the other table."""

OF_MODEL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("dense", "deep", "tied", "uneven", "qwen", "moe"), _COMMON),
    **dict.fromkeys(IN_PIECES, _PIECES),
}
"""Model of the table -> the keys of its exact mode."""

_DATA = "dp2, dp3, dp4, dp8, fsdp2, fsdp4, fsdp8, fsdp2 zero1, fsdp2 zero2, dp2.fsdp2, dp5"
_PIPELINES = (
    "pp2 gpipe, pp2 1f1b, pp2 interleaved-1f1b, pp2 zb-h1, pp2 interleaved-zero-bubble, pp2 zbv, pp2 dualpipev, "
    "pp4 gpipe, pp4 1f1b, pp4 zb-h1"
)
_RECOMPUTED = "dp1 full, dp1 selective, dp1 every_n, fsdp2 full, fsdp2 selective, pp2 full, pp2 selective"
_TOGETHER = "fsdp2.pp2, dp2.pp2, dp2.fsdp2.pp2, fsdp2.pp2 zb-h1, dp2.pp2 zbv full"
_TENSOR = (
    "tp2, tp2 no-sp, tp4, tp4 no-sp, dp2.tp2, fsdp2.tp2, dp2.fsdp2.tp2, tp2.pp2, dp2.tp2.pp2, fsdp2.tp2.pp2 zb-h1, "
    "tp2 full"
)
_CONTEXT = "cp2, cp2 gather, cp2 ulysses, cp4, cp4 ring_ulysses, dp2.cp2, fsdp2.cp2, cp2.tp2, dp2.cp2.tp2, cp2.pp2"
_EXPERTS = (
    "tp2, cp2, fsdp2.ep2, fsdp4.ep4, fsdp4.ep2, dp2.fsdp2.ep2, cp2.ep2, fsdp2.cp2.ep4, fsdp2.ep2.tp2, fsdp2.ep2.pp2"
)


def _in_bf16(rows: str) -> str:
    return ", ".join(f"{row} bf16" for row in rows.split(", "))


EXACT_ROWS: tuple[Row, ...] = rows_of_table(
    (
        ("dense", _DATA),
        ("dense", _PIPELINES),
        ("dense", _RECOMPUTED),
        ("dense", _TOGETHER),
        ("dense", _in_bf16(f"{_DATA}, {_PIPELINES}, {_RECOMPUTED}, {_TOGETHER}")),
        ("deep", "pp4 interleaved-1f1b, pp4 zbv, pp4 dualpipev, pp4 interleaved-zero-bubble"),
        ("tied", "dp2, fsdp2, pp2, pp2 zb-h1, pp2 zbv, pp4, fsdp2.pp2, dp2.pp2 dualpipev, fsdp2 bf16, pp2 zbv bf16"),
        ("uneven", "dp3, fsdp2, fsdp4, dp2.fsdp2 bf16, pp2 bf16"),
        ("qwen", "dp2, fsdp2, pp2 bf16"),
        ("moe", "dp2, fsdp2, pp2, fsdp2 bf16"),
        ("dense-pieces", f"{_TENSOR}, {_CONTEXT}"),
        ("dense-pieces", _in_bf16(f"{_TENSOR}, {_CONTEXT}")),
        ("tied-pieces", "tp2, fsdp2.tp2, tp2.pp2 bf16"),
        ("uneven-pieces", "tp2, tp4, fsdp2.tp2 bf16"),
        ("moe-pieces", f"{_EXPERTS}, {_in_bf16(_EXPERTS)}"),
        ("moe-shared-pieces", "fsdp2.ep2, fsdp2.ep2.tp2 bf16"),
    )
)


def of_exact_table(rows: Sequence[Row]) -> Chosen:
    """The cases of rows of the table.

    Args:
        rows: of `EXACT_ROWS`.

    Returns:
        What is to be run, and what is refused, with the reason.
    """
    cases, refused = list[Case](), list[Refused]()
    for row in rows:
        name, small = MODELS[IN_PIECES.get(row.model, row.model)]
        keys = (*small, *OF_MODEL[row.model], f"layout={row.words[0]}", *row.overrides)
        try:
            recipe = steady(load(name, keys))
            found = problems(recipe, world_size=recipe.layout.num_ranks)
        except RecipeError as error:
            refused.append(Refused(" ".join(row.words), row.model, tuple(error.problems)))
            continue
        if found:
            refused.append(Refused(" ".join(row.words), row.model, tuple(found)))
        else:
            cases.append(Case(" ".join(row.words), row.model, recipe))
    return Chosen(tuple(cases), tuple(refused))


def of_exact_recipe(recipe: Recipe, layouts: Sequence[tuple[str, Layout]], model: str) -> Chosen:
    """The cases of a recipe in several layouts, on a small model.

    Args:
        recipe: of any size.
        layouts: name and layout each.
        model: what the model is called.

    Returns:
        What is to be run.

    Raises:
        RecipeError: exact mode cannot have one of the layouts.
        DrumlineError: a layout has too many ranks.
    """
    for name, layout in layouts:
        check_size(name, layout)
    degree = max(layout.data_degree for _, layout in layouts)
    numerics = {**recipe.numerics.model_dump(), "mode": "exact", "lanes": max(LANES, 1 << (degree - 1).bit_length())}
    recipe = Recipe.model_validate(recipe.model_dump() | {"numerics": numerics})
    own = shrink(recipe, [layout for _, layout in layouts])
    cases = []
    for (name, layout), small in zip(layouts, own.recipes, strict=True):
        tree = small.model_dump()
        tree["numerics"] = numerics
        tree["data"] |= {"micro_batch": 1, "global_batch": numerics["lanes"] * MICROBATCHES_OF_A_LANE}
        exact = Recipe.model_validate(tree)
        found = problems(exact, world_size=layout.num_ranks)
        if found:
            raise RecipeError(found, recipe.name)
        cases.append(Case(name, model, exact))
    return Chosen(tuple(cases), kept=own.kept)
