"""The entry point: exit codes, help without loading commands, and messages."""

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer

from drumline.cli import app
from drumline.recipe.errors import CheckFailed, DrumlineError, RecipeError
from drumline.recipe.problem import Problem


@pytest.fixture
def command(monkeypatch):
    """Registers a function as the command `probe`."""

    def register(function):
        module = types.ModuleType("probe_module")
        module.probe = function
        monkeypatch.setitem(sys.modules, "probe_module", module)
        monkeypatch.setitem(app.COMMANDS, "probe", app.Entry("probe_module:probe", "A probe."))

    return register


def raising(error):
    def probe():
        raise error

    return probe


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DrumlineError("no such thing"), 2),
        (CheckFailed("they differ"), 1),
        (RecipeError([Problem("a-code", "a.key", 1, "is wrong")]), 2),
        (KeyboardInterrupt(), 130),
        (typer.Exit(7), 7),
        (OSError(28, "No space left on device", "/full"), 2),
        (ValueError("a fault"), 3),
        (RecursionError("deep"), 3),
        (SystemExit(4), 4),
    ],
)
def test_an_exception_ends_with_its_exit_code(command, capsys, error, code):
    command(raising(error))
    assert app.main(["probe"]) == code


def test_what_a_command_returns_is_no_exit_code(command):
    command(lambda: 5)
    assert app.main(["probe"]) == 0


def test_a_fault_is_one_line_with_the_path_of_a_saved_traceback(command, capsys):
    command(raising(ValueError("first line\nsecond line")))
    app.main(["probe"])
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("drumline failed: ValueError: first line; the traceback is in ")
    path = Path(message.split()[-1])
    assert "in probe" in path.read_text()
    path.unlink()


def test_a_full_disk_is_named_without_a_traceback(command, capsys):
    command(raising(OSError(28, "No space left on device", "/full")))
    app.main(["probe"])
    assert capsys.readouterr().err == "No space left on device: /full\n"


@pytest.mark.parametrize(
    "args", [["recpie", "list"], ["recipe", "shwo"], ["--no-such-option"], ["recipe", "list", "--jsno"]]
)
def test_a_usage_error_exits_2_and_suggests(capsys, args):
    assert app.main(args) == 2
    assert "Error" in capsys.readouterr().err


def test_a_mistyped_command_gets_did_you_mean(capsys):
    assert app.main(["recpie"]) == 2
    assert "'recipe'" in capsys.readouterr().err


def test_help_lists_every_command_without_loading_one(capsys):
    assert app.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, entry in app.COMMANDS.items():
        assert f"  {name} " in text
        assert entry.help.split()[0] in text


def is_there(name):
    module = app.COMMANDS[name].target.split(":")[0]
    return importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("name", [name for name in app.COMMANDS if is_there(name)])
def test_a_commands_own_help_starts_with_its_line_in_the_table(name, capsys):
    assert app.main([name, "--help"]) == 0
    assert app.COMMANDS[name].help in " ".join(capsys.readouterr().out.split())


def test_version(capsys):
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("drumline ")


def test_a_reader_who_goes_away_is_no_failed_check():
    script = "import sys; from drumline.cli.app import main; sys.exit(main())"
    shell = f"{sys.executable} -c '{script}' --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() in ("0", "141")
    assert "Traceback" not in done.stderr
