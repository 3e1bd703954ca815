"""From what a user asks for to the cases that are run: layouts of a recipe, or rows of the built-in table."""

from collections.abc import Sequence
from dataclasses import dataclass

from drumline.recipe import Layout, Problem, Recipe, RecipeError, problems
from drumline.recipe.errors import DrumlineError
from drumline.verify.matrix import Row, case_of
from drumline.verify.run import Case
from drumline.verify.shrink import Shrunk, choosing_all, common_batch, shrink, with_batch

MAX_RANKS = 16


@dataclass(frozen=True)
class Refused:
    """A layout that cannot be run.

    Attributes:
        name: of the layout.
        model: of the model.
        problems: why.
    """

    name: str
    model: str
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Chosen:
    """What is to be run.

    Attributes:
        cases: the layouts.
        refused: what was asked for but is refused.
        kept: what shrinking kept, a line each.
    """

    cases: tuple[Case, ...]
    refused: tuple[Refused, ...] = ()
    kept: tuple[str, ...] = ()


def of_recipe(recipe: Recipe, layouts: Sequence[tuple[str, Layout]], model: str) -> Chosen:
    """The cases of a recipe in several layouts, on a small model; in bf16 also in fp32, where faults show best.

    Args:
        recipe: of any size.
        layouts: name and layout each.
        model: what the model is called.

    Returns:
        What is to be run.

    Raises:
        RecipeError: the recipe cannot have one of the layouts; with the full recipe's numbers.
        DrumlineError: a layout has too many ranks.
    """
    for name, layout in layouts:
        check_size(name, layout)
    batch = common_batch([layout for _, layout in layouts])
    for _, layout in layouts:
        found = _of_layout(with_batch(recipe.model_copy(update={"layout": layout}), batch))
        if found:
            raise RecipeError(found, recipe.name)
    precisions = dict.fromkeys(("fp32", recipe.precision.compute))
    cases, kept = list[Case](), tuple[str, ...]()
    for compute in precisions:
        precision = recipe.precision.model_copy(update={"compute": compute})
        small = shrink(recipe.model_copy(update={"precision": precision}), [layout for _, layout in layouts])
        if compute == "bf16" and recipe.model.moe is not None:
            small = Shrunk(
                tuple(map(choosing_all, small.recipes)), (*small.kept, "in bf16 a token goes to all experts")
            )
        kept = small.kept
        for (name, layout), one in zip(layouts, small.recipes, strict=True):
            assert not problems(one, world_size=layout.num_ranks), "what is legal stays legal"
            cases.append(Case(name, model, one))
    return Chosen(tuple(cases), kept=kept)


def of_table(rows: Sequence[Row]) -> Chosen:
    """The cases of rows of the built-in table.

    Args:
        rows: from `matrix.select`.

    Returns:
        What is to be run; rows that this version cannot run are refused, with the reason.
    """
    cases, refused = list[Case](), list[Refused]()
    for row in rows:
        try:
            case = case_of(row)
            found = problems(case.recipe, world_size=case.recipe.layout.num_ranks)
        except RecipeError as error:
            found, case = list(error.problems), None
        if case is None or found:
            refused.append(Refused(" ".join(row.words), row.model, tuple(found)))
        else:
            cases.append(case)
    return Chosen(tuple(cases), tuple(refused))


def _of_layout(recipe: Recipe) -> list[Problem]:
    """Problems, but for those of data that is not read here, and of a run that does not take place."""
    ignored = ("data.tokenizer", "data.sources", "data.validation", "run.", "metrics.")
    return [found for found in problems(recipe) if not found.key.startswith(ignored)]


def check_size(name: str, layout: Layout) -> None:
    """Refuses a layout of more ranks than are started here.

    Args:
        name: of the layout, as it was asked for.
        layout: the layout.

    Raises:
        DrumlineError: names the layout and a smaller one.
    """
    if layout.num_ranks <= MAX_RANKS:
        return
    degrees = {axis: min(2, getattr(layout, axis)) for axis in ("pp", "dp", "fsdp", "cp", "tp", "ep")}
    smaller = layout.model_copy(update=degrees)
    while smaller.num_ranks > MAX_RANKS:
        smaller = smaller.model_copy(update={"dp": 1})
    raise DrumlineError(
        f"layout {name} has {layout.num_ranks:,} ranks, more than the {MAX_RANKS} that verify starts here; degrees of "
        f"2 show the same faults\n  try: --layout {smaller}"
    )
