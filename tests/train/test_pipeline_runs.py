"""Runs through pipelines: what they commit any other pipeline goes on from, and a step can be timed."""

import json
import math
import shutil
from itertools import pairwise

import pytest
from tests.train.runs import assert_same_bits, rows, steps, tensors, train_here

from drumline.checkpoint import open_commit
from drumline.cli.app import main
from drumline.recipe.errors import DrumlineError
from drumline.schedules import generate, read_timeline

STEPS = 6
KEYS = (f"run.steps={STEPS}", "checkpoint.every=3", "model.num_layers=4", "run.validation_batches=0")
TIED = "model.tie_embeddings=true"


def last_commit(run_dir):
    return run_dir / "checkpoints" / f"step-{STEPS:08d}"


def train_half(run_dir, *keys):
    """Trains and takes the last commit away, so that the run goes on from the middle."""
    train_here(run_dir, *keys)
    shutil.rmtree(last_commit(run_dir))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    run = tmp_path_factory.mktemp("one")
    train_here(run, *KEYS, "optimizer.max_grad_norm=0")
    return run


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_run_goes_on_under_other_pipelines_bit_for_bit(schedule, one_rank, tmp_path):
    # Without clipping, as the norm's last bits depend on the order in which ranks are added.
    first = tmp_path / "first"
    keys = (*KEYS, "optimizer.max_grad_norm=0")
    train_half(first, *keys, "layout=pp2", f"layout.pp_schedule={schedule}")
    for after in ("pp1", "pp4", "pp2"):
        run = tmp_path / after
        shutil.copytree(first, run)
        train_here(run, *keys, f"layout={after}")
        assert [row["loss_hex"] for row in rows(run, "step")] == [row["loss_hex"] for row in rows(one_rank, "step")]
        assert_same_bits(tensors(last_commit(run)), tensors(last_commit(one_rank)))


@pytest.mark.parametrize("after", ["dp2", "fsdp2", "pp2.dp2", "pp2.fsdp2"])
def test_a_run_goes_on_under_other_kinds_of_layouts(after, one_rank, tmp_path):
    keys = (*KEYS, "optimizer.max_grad_norm=0")
    train_half(tmp_path, *keys, "layout=pp2", "layout.pp_schedule=interleaved-1f1b")
    train_here(tmp_path, *keys, f"layout={after}", "layout.pp_schedule=zb-h1")
    found, expected = rows(tmp_path, "step"), rows(one_rank, "step")
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "schedule"), [("pp2", "1f1b"), ("pp2", "zbv"), ("pp2.fsdp2", "zb-h1"), ("pp2.dp2", "1f1b")]
)
def test_a_tied_embedding_is_committed_once_and_read_into_both_stages(layout, schedule, tmp_path):
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    keys = (*KEYS, TIED, f"layout={layout}", f"layout.pp_schedule={schedule}")
    train_here(through, *keys)
    train_half(resumed, *keys)
    stored = open_commit(resumed / "checkpoints" / "step-00000003").index.tensors["model.embedding.weight"]
    assert sum(math.prod(piece.shape) for piece in stored.pieces) == math.prod(stored.shape)
    train_here(resumed, *keys)
    assert steps(resumed) == steps(through)
    assert_same_bits(tensors(last_commit(resumed)), tensors(last_commit(through)))


def test_a_killed_pipeline_resumes_bit_for_bit(tmp_path):
    through, killed = tmp_path / "through", tmp_path / "killed"
    keys = (*KEYS, "layout=pp2.dp2", "layout.pp_schedule=interleaved-1f1b")
    train_here(through, *keys)
    train_here(killed, *keys, kill_after=4)
    train_here(killed, *keys)
    assert steps(killed) == steps(through)
    assert_same_bits(tensors(last_commit(killed)), tensors(last_commit(through)))


def test_a_timed_step_has_the_schedules_actions_and_is_drawn_above_its_simulation(tmp_path, capsys):
    keys = ("layout=pp2", "layout.pp_schedule=zbv", "run.timeline=2", "run.steps=2", "checkpoint.every=0")
    train_here(tmp_path, *KEYS, *keys)
    timeline = read_timeline(tmp_path / "pipeline.json")
    assert tuple(tuple(span.action for span in row) for row in timeline.spans) == generate("zbv", 2, 8).order
    ends = {span.action: span.end for row in timeline.spans for span in row}
    for row in timeline.spans:
        assert all(a.end <= b.start for a, b in pairwise(row))
        for span in row:
            before = span.action._replace(stage=span.action.stage - 1)
            if span.action.kind == "F" and span.action.stage:
                assert ends[before] <= span.start
    picture = tmp_path / "timeline.svg"
    capsys.readouterr()
    assert main(["simulate", "schedule", "--measured", str(tmp_path / "pipeline.json"), "--out", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("measured, zbv: 2 ranks, 4 stages, 8 micro-batches")
    assert "\nsimulated, zbv" in out
    assert picture.read_text().count("0F0:") == 2
    assert main(["simulate", "schedule", "--measured", str(tmp_path / "pipeline.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["simulated"]["makespan"] <= 1.001 * found["measured"]["makespan"]


def test_a_run_that_is_not_timed_writes_no_timeline(one_rank):
    assert not (one_rank / "pipeline.json").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "it is not JSON"),
        ('{"spans": []}', "run.timeline"),
        ('{"schedule": "x", "placement": [0], "spans": [[]]}', "no action"),
    ],
)
def test_what_is_no_timeline_is_refused(text, says, tmp_path):
    file = tmp_path / "pipeline.json"
    file.write_text(text)
    with pytest.raises(DrumlineError, match=says):
        read_timeline(file)


def test_a_schedule_file_for_another_number_of_micro_batches_is_refused(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    with pytest.raises(AssertionError, match="is for 1 micro-batches, but the run has 8"):
        train_here(tmp_path / "run", *KEYS, "layout=pp2", f"layout.pp_schedule={file}")
