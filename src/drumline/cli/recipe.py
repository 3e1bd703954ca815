"""`drumline recipe`: list, show, validate and compare recipes. Needs no torch."""

from typing import Annotated, Any, Literal

import typer

from drumline.cli.output import print_json, print_table
from drumline.recipe import (
    CheckFailed,
    Machine,
    Problem,
    Recipe,
    RecipeError,
    builtin_names,
    check,
    digest,
    full_digest,
    load,
    num_active_parameters,
    num_parameters,
    problems,
    to_toml,
)
from drumline.recipe import diff as compare
from drumline.recipe import schema as json_schema
from drumline.recipe.problem import ABSENT, show

recipe = typer.Typer(
    help="List, show, validate and compare recipes.", rich_markup_mode=None, no_args_is_help=True, add_completion=False
)

Name = Annotated[str, typer.Argument(metavar="RECIPE", help="A built-in recipe's name, or a TOML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, such as layout.tp=4.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@recipe.command("list")
def list_recipes(json: Json = False) -> None:
    """List the built-in recipes."""
    rows = [_summary(load(name)) for name in builtin_names()]
    if json:
        print_json(rows)
        return
    columns = (
        "name",
        "parameters",
        "layers",
        "dim",
        "heads",
        "vocab",
        "seq len",
        "tokens/step",
        "layout",
        "ranks",
        "runs",
    )
    numeric = (*columns[1:8], "ranks")
    print_table(columns, ([_cell(value) for value in row.values()] for row in rows), numeric)


def _summary(found: Recipe) -> dict[str, Any]:
    model, data = found.model, found.data
    return {
        "name": found.name,
        "num_parameters": num_parameters(model),
        "num_layers": model.num_layers,
        "dim": model.dim,
        "heads": f"{model.num_heads}/{model.num_kv_heads}",
        "vocab_size": model.vocab_size,
        "seq_len": data.seq_len,
        "tokens_per_step": data.seq_len * data.global_batch,
        "layout": str(found.layout),
        "num_ranks": found.layout.num_ranks,
        "runs_today": not problems(found),
    }


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "not yet"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _parameters(found: Recipe) -> str:
    active = f", {num_active_parameters(found.model):,} active" if found.model.moe is not None else ""
    return f"{num_parameters(found.model):,} parameters{active}"


def _layout(found: Recipe) -> str:
    ranks = found.layout.num_ranks
    return f"layout {found.layout} on {ranks:,} rank{'s' * (ranks > 1)}"


@recipe.command("show")
def show_recipe(name: Name, overrides: Overrides = None, json: Json = False) -> None:
    """Print a recipe with every key, as TOML."""
    found = load(name, overrides or (), command="drumline recipe show")
    if json:
        print_json(
            {
                "recipe": found.model_dump(mode="json"),
                "num_parameters": num_parameters(found.model),
                "num_active_parameters": num_active_parameters(found.model),
                "num_ranks": found.layout.num_ranks,
                "digest": digest(found),
                "full_digest": full_digest(found),
            }
        )
        return
    typer.echo(
        f"# {_parameters(found)}; {_layout(found)}\n"
        f"# {found.data.global_batch * found.data.seq_len:,} tokens a step; digest of the maths {digest(found)[:16]}\n"
        f"{to_toml(found)}",
        nl=False,
    )


@recipe.command()
def validate(
    name: Name,
    overrides: Overrides = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks that will run.")] = None,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="What will compute.")] = None,
    json: Json = False,
) -> None:
    """Check that a recipe can run, or list every problem.

    Exits 1 when there is a problem.
    """
    from drumline.cluster import accelerator_names

    command = "drumline recipe validate"
    machine = Machine(world_size, device, accelerators=accelerator_names())
    options = [word for option in (("--world-size", world_size), ("--device", device)) if option[1] for word in option]
    words = [str(word) for word in options]
    try:
        found = load(name, overrides or (), command=command, options=words, machine=machine)
        check(found, **vars(machine), command=(*command.split(), name, *(overrides or ()), *words))
    except RecipeError as error:
        if json:
            print_json(
                {
                    "valid": False,
                    "problems": [_problem(problem) for problem in error.problems],
                    "mended": list(error.mended),
                }
            )
            raise typer.Exit(1) from error
        raise CheckFailed(str(error)) from error
    if json:
        print_json({"valid": True, "problems": [], "mended": []})
    else:
        typer.echo(f"{found.name} can run: {_parameters(found)}, {_layout(found)}")


def _problem(problem: Problem) -> dict[str, Any]:
    return {
        "code": problem.code,
        "key": problem.key,
        "value": None if problem.value is ABSENT else problem.value,
        "rule": problem.rule,
        "nearest": problem.nearest,
        "remedy": problem.remedy,
    }


@recipe.command("diff")
def diff_recipes(
    first: Annotated[str, typer.Argument(help="A recipe.")],
    second: Annotated[str, typer.Argument(help="Another recipe.")],
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Compare two recipes key by key.

    Overrides apply to the second. Exits 1 when they differ.
    """
    found = compare(
        load(first, command="drumline recipe show"), load(second, overrides or (), command="drumline recipe show")
    )
    if json:
        rows = [
            {"key": row.key, "first": _absent(row.first), "second": _absent(row.second), "is_maths": row.is_maths}
            for row in found
        ]
        print_json({"equal": not found, "differences": rows})
    elif found:
        cells = ((row.key, _shown(row.first), _shown(row.second), "yes" if row.is_maths else "") for row in found)
        print_table(("key", first, second, "changes the maths"), cells)
    else:
        typer.echo("the recipes are equal")
    if found:
        raise typer.Exit(1)


def _absent(value: Any) -> Any:
    return None if value is ABSENT else value


def _shown(value: Any) -> str:
    return "-" if value is ABSENT else show(value)


@recipe.command()
def schema(json: Json = False) -> None:  # always JSON; the option is there because every command has it
    """Print the JSON Schema of a recipe file, for editors."""
    print_json(json_schema())
