"""`drumline recipe`: list, show, validate and compare recipes."""

import typer

recipe = typer.Typer(help="List, show, validate and compare recipes.", rich_markup_mode=None, no_args_is_help=True)


@recipe.command("list")
def list_recipes() -> None:
    """List the built-in recipes."""


@recipe.command()
def schema() -> None:
    """Print the JSON Schema."""
