"""Reading run directories, whole and damaged."""

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.report.made_runs import write_run

from drumline.report import ReportError, read_run, summarize


def test_a_run_is_read_as_it_was_written(tmp_path):
    rows = write_run(tmp_path / "run", num_steps=100, commits=(50, 100))
    run = read_run(tmp_path / "run")
    steps = [row for row in rows if row["kind"] == "step"]
    assert run.step.tolist() == list(range(1, 101))
    assert run["loss"].tolist() == [row["loss"] for row in steps]
    assert run["memory_bytes"].tolist() == [row["memory_bytes"] for row in steps]
    assert run.validation_step.tolist() == [0, 50, 100]
    assert [event.kind for event in run.events] == ["start", "commit", "commit", "end"]
    assert [(checkpoint.step, checkpoint.is_whole) for checkpoint in run.checkpoints] == [(50, True), (100, True)]
    assert run.recipe is not None
    assert run.environment["packages"]["torch"] == "2.13.0"
    assert run.notes == ()


PLAN = {"run": {"steps": 400}}


def test_the_summary_counts_what_the_rows_say(tmp_path):
    rows = write_run(
        tmp_path / "run", num_steps=100, commits=(50,), resumed_at=(50,), overrides={"run": {"steps": 400}}
    )
    summary = summarize(read_run(tmp_path / "run"))
    steps = [row for row in rows if row["kind"] == "step"]
    assert (summary.status, summary.num_steps, summary.planned_steps) == ("done", 100, 400)
    assert (summary.layout, summary.world, summary.num_resumes) == ("dp2", 2, 1)
    assert summary.num_tokens == 100 * 4080
    assert summary.first_loss == steps[0]["loss"]
    assert summary.last_loss == pytest.approx(sum(row["loss"] for row in steps[-10:]) / 10)
    assert summary.peak_memory_bytes == 1_320_000_000
    assert summary.train_s == pytest.approx(sum(row["step_s"] for row in steps))
    assert summary.validation_drop == pytest.approx(1 - (2.3 + 5.3 * math.exp(-100 / 60)) / 7.62)
    assert summary.num_checkpoints == 1
    assert json.loads(json.dumps(summary.to_json(), allow_nan=False))["mfu"] > 0


def test_a_half_written_line_and_foreign_lines_are_left_out_and_named(tmp_path):
    write_run(tmp_path / "run", num_steps=20)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[3:3] = [
        "not json",
        "[1, 2]",
        '{"kind": "step"}',
        '{"kind": "step", "step": "4"}',
        "\ufffd\x00",
        "[" * 100_000,
    ]
    path.write_text("\n".join(lines) + '\n{"kind": "step", "st')
    run = read_run(tmp_path / "run")
    assert len(run.step) == 20
    assert run.notes == ("metrics.jsonl: 7 lines left out as unreadable (lines 4, 5, 6, 7, 8, 9, 30)",)


def test_values_of_the_wrong_kind_count_as_absent(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        '{"kind": "step", "step": 1, "loss": "x", "lr": true, "grad_norm": NaN, "mfu": null, "step_s": 1e999}\n'
        f'{{"kind": "step", "step": 2, "loss": 1{"0" * 400}}}\n'
    )
    run = read_run(folder)
    assert math.isnan(run["loss"][0])
    assert math.isnan(run["lr"][0])
    assert math.isnan(run["loss"][1])
    assert summarize(run).to_json()["first_loss"] is None


def test_a_step_that_was_written_twice_counts_as_it_was_written_last(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"kind": "step", "step": step, "loss": loss} for step, loss in ((1, 5.0), (2, 4.0), (2, 3.0), (3, 2.0))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(folder)["loss"].tolist() == [5.0, 3.0, 2.0]


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([], "empty"),
        ([("start", "")], "unfinished"),
        ([("start", ""), ("end", "done")], "done"),
        ([("start", ""), ("end", "preempted")], "preempted"),
        ([("start", ""), ("end", "preempted"), ("start", "")], "unfinished"),
        ([("start", ""), ("end", "failed")], "failed"),
    ],
)
def test_the_status_is_what_the_last_start_or_end_says(tmp_path, rows, status):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": kind, "step": 0, "reason": reason}) + "\n" for kind, reason in rows)
    )
    assert summarize(read_run(tmp_path)).status == status


def test_a_damaged_checkpoint_is_listed_with_what_is_wrong(tmp_path):
    write_run(tmp_path / "run", num_steps=20, commits=(10, 20))
    shard = next((tmp_path / "run" / "checkpoints" / "step-00000020").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4])
    good, bad = read_run(tmp_path / "run").checkpoints
    assert good.is_whole
    assert shard.name in bad.problem


def test_a_recipe_of_another_version_is_shown_as_it_is(tmp_path):
    write_run(tmp_path / "run", num_steps=2)
    (tmp_path / "run" / "recipe.json").write_text('{"model": {"num_wheels": 4}}')
    run = read_run(tmp_path / "run")
    assert run.recipe is None
    assert "num_wheels" in run.recipe_text
    assert "model.num_wheels" in run.notes[0]


def test_a_folder_without_a_run_is_refused_and_runs_below_it_are_named(tmp_path):
    write_run(tmp_path / "runs" / "first", num_steps=2)
    with pytest.raises(ReportError, match=r"runs is not a run's directory.*; runs in it: first"):
        read_run(tmp_path / "runs")


def test_a_missing_folder_and_a_file_are_refused(tmp_path):
    with pytest.raises(ReportError, match="does not exist"):
        read_run(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match="is a file"):
        read_run(tmp_path / "file")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner), max_leaves=3
)
ROW = st.dictionaries(st.sampled_from(["kind", "step", "loss", "stall_s", "time", "resumed_from", "world"]), JSON)
KNOWN = st.fixed_dictionaries(
    {"kind": st.sampled_from(["step", "validation", "start", "commit", "end"]), "step": st.integers()},
    optional={
        "loss": JSON,
        "time": JSON,
        "stall_s": JSON,
        "num_bytes": JSON,
        "world": JSON,
        "reason": JSON,
        "layout": JSON,
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(st.lists(ROW | KNOWN, max_size=8))
def test_no_content_of_the_metrics_stops_the_report(tmp_path, rows):
    from drumline.report.page import render

    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    render([read_run(tmp_path)])
