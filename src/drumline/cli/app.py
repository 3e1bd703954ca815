"""The entry point: finds the command by its name, loads only that one, and turns what it raises into an exit code.

Commands are a table, name -> (`module:attribute`, one line of help), so that `drumline --help` loads none of them.
The attribute is either a `typer.Typer()` named after the command (one with subcommands, such as `recipe`) or a plain
function with typer's annotations (such as `train`). Its own help starts with the line of the table; a test holds them
together. To add a command, add a module and a line.

Exit codes
    0    good
    1    a check ran and failed: `CheckFailed`
    2    the request was wrong: any other `DrumlineError`, a usage error, or a machine that refuses (full disk, ...)
    3    drumline itself failed: one line, and the path of the saved traceback
    130  interrupted
    A command that needs another code raises `typer.Exit(code)`; what a command returns is ignored.
"""

import errno
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import typer
import typer.core
import typer.main

from drumline import __version__


class Entry(NamedTuple):
    """Where a command lives, and what its line in `drumline --help` says."""

    target: str
    help: str


COMMANDS = {
    "train": Entry("drumline.cli.train:train", "Train a recipe, on one rank or many, and go on where it stopped."),
    "verify": Entry("drumline.cli.verify:verify", "Prove that layouts compute what one device computes."),
    "numerics": Entry("drumline.cli.numerics:numerics", "Capture what steps compute, compare captures, and gate them."),
    "reproduce": Entry(
        "drumline.cli.reproduce:reproduce",
        "Run a recorded run again, and say where its first bit differs.",
    ),
    "recipe": Entry("drumline.cli.recipe:recipe", "List, show, validate and compare recipes."),
    "data": Entry("drumline.cli.data:data", "Turn text into token shards, and look into them."),
    "checkpoint": Entry(
        "drumline.cli.checkpoint:checkpoint", "List, inspect, verify, compare and convert checkpoints."
    ),
    "simulate": Entry("drumline.cli.simulate:simulate", "Simulate pipeline schedules."),
    "bench": Entry("drumline.cli.bench:bench", "Measure on this machine what drumline claims of its operators."),
    "report": Entry("drumline.cli.report:report", "Write a run's report: one HTML file that opens offline."),
}

GOOD, CHECK_FAILED, REQUEST_WRONG, DRUMLINE_FAILED, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 130, 141

# What a machine says when it refuses; anything else that the system reports is taken for a fault of drumline.
_REFUSALS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EADDRINUSE,
    errno.EMFILE,
    errno.ENOMEM,
    errno.ENAMETOOLONG,
}


def load_command(name: str) -> Any:
    """Imports one command.

    Args:
        name: a key of `COMMANDS`.

    Returns:
        The command, ready to be invoked by typer.
    """
    module, attribute = COMMANDS[name].target.split(":")
    found = getattr(importlib.import_module(module), attribute)
    if isinstance(found, typer.Typer):
        command = typer.main.get_command(found)
    else:
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name=name, help=inspect.cleandoc(found.__doc__ or "").split("\nArgs:")[0])(found)
        command = typer.main.get_command(single)
    command.name = name
    return command


class _LazyCommands(MutableMapping):
    """The commands by name; getting one imports it, listing the names does not."""

    def __init__(self):
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = load_command(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __setitem__(self, name: str, command: Any) -> None:
        raise TypeError("commands are added to the table COMMANDS")

    def __delitem__(self, name: str) -> None:
        raise TypeError("commands are removed from the table COMMANDS")


class LazyGroup(typer.core.TyperGroup):
    """The root command: knows all names and their help, and loads one command at a time."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.commands = _LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the table."""
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the list of commands from the table, without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])

    def invoke(self, ctx: Any) -> None:
        """Runs the chosen command; drops what it returns, so that only an exception sets the exit code."""
        super().invoke(ctx)


_root = typer.Typer(cls=LazyGroup, add_completion=False, rich_markup_mode=None, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"drumline {__version__}")
        raise typer.Exit


@_root.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Train language models across many accelerators, and prove that what was trained is what was asked for."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        args: the arguments after the program's name; those of the process by default.

    Returns:
        The exit code, as listed at the top.
    """
    try:
        code = typer.main.get_command(_root).main(args, prog_name="drumline", standalone_mode=False)
        sys.stdout.flush()  # here, so that a reader who has gone away is noticed before the interpreter ends
        return code or GOOD
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return _pipe_closed()
    except SystemExit as error:
        if isinstance(
            error.__context__, BrokenPipeError
        ):  # typer ends itself with 1, which would read as a failed check
            return _pipe_closed()
        return error.code if isinstance(error.code, int) else GOOD if error.code is None else DRUMLINE_FAILED
    except Exception as error:
        from drumline.recipe.errors import CheckFailed, DrumlineError  # here, since `--help` has no need of recipes

        if isinstance(error, DrumlineError):
            _say(str(error))
            return CHECK_FAILED if isinstance(error, CheckFailed) else REQUEST_WRONG
        if _is_usage_error(error):
            error.show()  # pyright: ignore[reportAttributeAccessIssue]
            return REQUEST_WRONG
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            _say(f"{error.strerror}{f': {error.filename}' if error.filename else ''}")
            return REQUEST_WRONG
        _say(f"drumline failed: {_one_line(error)}; the traceback is in {save_traceback(error)}")
        return DRUMLINE_FAILED


def save_traceback(error: BaseException) -> str:
    """Writes the traceback of an exception into a new file.

    Args:
        error: the exception.

    Returns:
        The path of the file; `(not saved)` where no file can be written.
    """
    import tempfile
    import traceback

    text = "".join(traceback.format_exception(error))
    try:
        number, path = tempfile.mkstemp(prefix="drumline-traceback-", suffix=".txt")
        with open(number, "w", encoding="utf-8") as file:
            file.write(f"drumline {__version__}, {' '.join(sys.argv)}\n\n{text}")
    except OSError:
        sys.stderr.write(text)
        return "(not saved)"
    return path


def _is_usage_error(error: Exception) -> bool:
    # By shape: newer typer carries its own click, older typer imports click; both have these two methods.
    return hasattr(error, "exit_code") and callable(getattr(error, "show", None))


def _one_line(error: BaseException) -> str:
    message = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")


def _pipe_closed() -> int:
    # The interpreter flushes stdout once more when it ends; let that go nowhere instead of raising again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


if __name__ == "__main__":
    sys.exit(main())
