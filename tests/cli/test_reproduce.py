"""`drumline reproduce`: the same bits, other bits, and runs that cannot be replayed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.train.runs import environment, rows, train_here

from drumline.cli.app import main
from drumline.train.replay import Compared, parse_steps

KEYS = ("run.steps=6", "checkpoint.every=2", "checkpoint.keep=9", "model.dropout=0.1", "optimizer.state_dtype=bf16")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    train_here(folder, *KEYS)
    return folder


def copy(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to / "copy"))


def reproduce(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "drumline", "reproduce", *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)


def change_loss(run: Path, step: int, hexadecimal: str) -> None:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for row in lines:
        if row["kind"] == "step" and row["step"] == step:
            row["loss_hex"] = hexadecimal
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))


def test_a_run_is_reproduced_bit_for_bit_and_left_as_it_is(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = reproduce(run)
    assert done.returncode == 0, done.stderr
    assert "same: 6 of 6 steps, bit for bit" in done.stdout
    assert "from the seed" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_replay_begins_at_the_commit_before_the_first_wanted_step(run, tmp_path):
    done = reproduce(run, "--steps", "6:6", "--json", "--keep", tmp_path / "kept")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["from"] == str(run / "checkpoints/step-00000004")
    assert [step["step"] for step in found["steps"]] == [5, 6]
    assert all(step["same"] for step in found["steps"])
    recorded = [(row["loss_hex"], row["grad_norm_hex"]) for row in rows(run, "step")][4:]
    assert [(row["loss_hex"], row["grad_norm_hex"]) for row in rows(tmp_path / "kept", "step")] == recorded
    assert [row["reason"] for row in rows(tmp_path / "kept", "end")] == ["done"]


def test_another_layout_has_other_bits_and_is_told_so(run):
    done = reproduce(run, "--steps", "3", "layout=dp2")
    assert done.returncode == 1, done.stderr
    assert "recorded under dp1 and replayed under dp2" in done.stdout
    assert "of 3 steps differ; the first is step" in done.stderr


def test_a_difference_is_told_by_step_value_and_bit(run, tmp_path):
    changed = copy(run, tmp_path)
    right = float.fromhex(rows(run, "step")[1]["loss_hex"])
    change_loss(changed, 2, (right * (1 + 2.0**-40)).hex())
    environment_file = changed / "environment.json"
    noted = json.loads(environment_file.read_text())
    noted["packages"]["torch"] = "1.0"
    environment_file.write_text(json.dumps(noted))
    done = reproduce(changed, "--steps", "3")
    assert done.returncode == 1
    assert "1 of 3 steps differ; the first is step 2: loss differs after" in done.stderr
    assert right.hex() in done.stdout
    assert "environment: packages.torch was 1.0, is " in done.stdout


@pytest.mark.parametrize(
    ("there", "here", "verdict"),
    [
        ("0x1.0000000000000p+0", "0x1.0000000000000p+0", "same"),
        ("0x1.0000000000000p+0", "0x1.0000000000001p+0", "loss differs after 51 of 52 bits"),
        ("0x1.0000000000000p+0", "0x1.8000000000000p+0", "loss differs after 0 of 52 bits"),
        ("0x1.0000000000000p+0", "0x1.0000000000000p+1", "loss differs in sign or exponent"),
        ("0x1.0000000000000p+0", "-0x1.0000000000000p+0", "loss differs in sign or exponent"),
    ],
)
def test_the_first_bit_that_differs_is_counted_in_the_significand(there, here, verdict):
    assert Compared(1, {"loss": there}, {"loss": here}).verdict == verdict


@pytest.mark.parametrize(("text", "steps"), [("", (1, None)), ("4", (1, 4)), ("2:3", (2, 3)), ("3:3", (3, 3))])
def test_steps_are_read(text, steps):
    assert parse_steps(text) == steps


def refused(capsys, *arguments: object) -> str:
    assert main(["reproduce", *map(str, arguments)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "3:2", "x", "1:", ":2", "-1"])
def test_steps_that_are_none_are_refused(run, text, capsys):
    assert "names no steps" in refused(capsys, run, f"--steps={text}")


def test_what_cannot_be_replayed_is_said(run, tmp_path, capsys):
    assert "has no recipe.json" in refused(capsys, tmp_path)
    assert "step 7 of" in refused(capsys, run, "--steps", "7")
    assert "run.seed: 0 there, 1 here" in refused(capsys, run, "run.seed=1")
    assert "layout-world" in refused(capsys, run, "--nproc", "2")
    assert "is not empty" in refused(capsys, run, "--keep", run)
    changed = copy(run, tmp_path)
    (changed / "metrics.jsonl").write_text('{"kind": "start", "step": 0}\nhalf a li')
    assert "has no step to compare with" in refused(capsys, changed)


def test_a_run_whose_beginning_is_gone_is_replayed_from_what_is_left(run, tmp_path, capsys):
    changed = copy(run, tmp_path)
    path = changed / "metrics.jsonl"
    path.write_text(path.read_text().replace('"resumed_from": null', '"resumed_from": "imported"'))
    assert "began from a commit that is gone; steps 3 on can be: --steps 3:6" in refused(capsys, changed, "--steps=1")
    done = reproduce(changed)
    assert done.returncode == 0, done.stderr
    assert "same: 4 of 4 steps" in done.stdout


def test_data_that_has_changed_is_no_difference_of_bits(run, tmp_path):
    changed = copy(run, tmp_path)
    path = changed / "metrics.jsonl"
    data = rows(run, "start")[0]["data"]
    path.write_text(path.read_text().replace(data, "0" * len(data)))
    done = reproduce(changed, "--steps", "1")
    assert done.returncode == 2
    assert "its data has changed" in done.stderr


def test_a_run_that_stops_early_has_the_schedule_of_the_whole(run, tmp_path):
    train_here(tmp_path, *KEYS, "run.stop_after=5", "checkpoint.every=0")
    assert [row["lr"] for row in rows(tmp_path, "step")] == [row["lr"] for row in rows(run, "step")[:5]]
    assert rows(tmp_path, "end")[-1]["reason"] == "stopped"
