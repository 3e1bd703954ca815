"""Commands that need no tensor start without torch and without the libraries that are slow to import."""

import subprocess
import sys

import pytest

SLOW = ("torch", "numpy", "rich", "transformers", "tokenizers")


def loaded_by(*args):
    script = (
        "import sys, io, contextlib\n"
        "from drumline.cli.app import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    code = main({list(args)!r})\n"
        f"print(code, [name for name in {SLOW!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("--version",),
        ("recipe", "--help"),
        ("recipe", "list"),
        ("recipe", "show", "llama3-405b"),
        ("recipe", "validate", "llama3-8b"),
        ("recipe", "diff", "llama3-8b", "llama3-8b"),
        ("recipe", "schema"),
        ("simulate", "schedule", "--schedule", "zbv", "--pp", "4", "--microbatches", "8"),
        ("simulate", "schedule", "--schedule", "all", "--pp", "4", "--microbatches", "8", "--json"),
    ],
)
def test_a_command_that_needs_no_tensor_loads_nothing_slow(args):
    assert loaded_by(*args) == "0 []"


def test_help_does_not_even_load_recipes():
    script = (
        "import sys; from drumline.cli.app import main; main(['--help']); "
        "print('pydantic' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "False"
