"""Rooms import downwards only, and nothing below the line loads torch."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.house.rules import ROOMS, SOURCE, label

ROOT = SOURCE.parents[1]
BELOW_THE_LINE = ("planner", "schedules", "collectives", "cluster", "recipe")
ABOVE_THE_LINE = ("models", "parallel", "optimizers")


def modules_of(room: Path) -> list[str]:
    return [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in sorted(room.rglob("*.py"))]


def loads_torch(modules: list[str], path: Path = SOURCE.parent) -> bool:
    """Whether importing modules in a fresh interpreter loads torch."""
    script = f"import sys; sys.path.insert(0, {str(path)!r}); " + "".join(f"import {name}; " for name in modules)
    done = subprocess.run(
        [sys.executable, "-c", script + "print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip() == "True"


@pytest.mark.parametrize("room", [room for room in ROOMS if label(room).split("/")[0] in BELOW_THE_LINE], ids=label)
def test_no_module_below_the_line_loads_torch(room):
    assert not loads_torch(modules_of(room))


def test_the_package_and_its_command_line_load_no_torch():
    assert not loads_torch(["drumline", "drumline.cli", "drumline.cli.app", "drumline.cli.recipe"])


@pytest.mark.parametrize("room", [name for name in ABOVE_THE_LINE if (SOURCE / name).is_dir()])
def test_the_probe_sees_torch_in_rooms_above_the_line(room):
    assert loads_torch([f"drumline.{room}"])


def test_the_probe_sees_torch_behind_another_module(tmp_path):
    (tmp_path / "first.py").write_text("import second")
    (tmp_path / "second.py").write_text("import torch")
    assert loads_torch(["first"], tmp_path)


def lint_imports(folder: Path) -> subprocess.CompletedProcess:
    script = "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports_command as run; run()"
    return subprocess.run(
        [sys.executable, "-c", script, "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def copy_of_the_house(folder: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(SOURCE, folder / "src" / "drumline", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_rooms_import_downwards_only(tmp_path):
    done = lint_imports(copy_of_the_house(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("recipe/nearest.py", "import drumline.planner"),
        ("models/__init__.py", "import drumline.data"),
        ("storage/__init__.py", "import drumline.train"),
        ("numerics/__init__.py", "import drumline.cli.app"),
    ],
)
def test_an_import_upwards_or_sideways_is_found(tmp_path, room, line):
    module = copy_of_the_house(tmp_path) / "src" / "drumline" / room
    with module.open("a") as file:
        file.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert "BROKEN" in done.stdout


def test_a_new_room_must_be_given_a_layer(tmp_path):
    room = copy_of_the_house(tmp_path) / "src" / "drumline" / "attic"
    room.mkdir()
    (room / "__init__.py").write_text('"""A room."""\n')
    assert lint_imports(tmp_path).returncode != 0
