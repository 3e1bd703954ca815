"""A run that was killed and resumed is the run that was not, bit for bit; and it may go on under another layout."""

import functools
import os
import shutil
import signal

import pytest
from tests.train.runs import (
    assert_same_bits,
    interrupt_after,
    rows,
    save_when_loaded,
    steps,
    tensors,
    train,
    train_here,
)

from drumline.checkpoint import open_commit

LAYOUTS = ("dp1", "dp2", "fsdp2", "dp2.fsdp2", "fsdp2.cp2")
STEPS = 12
KEYS = (f"run.steps={STEPS}", "checkpoint.every=3")


def last_commit(run_dir):
    return run_dir / "checkpoints" / f"step-{STEPS:08d}"


@pytest.mark.parametrize("layout", [*LAYOUTS, "dp4", "fsdp3.dp1", "cp2", "tp2", "fsdp2.tp2"])
def test_a_killed_run_resumes_bit_for_bit(layout, tmp_path):
    through, killed = tmp_path / "through", tmp_path / "killed"
    keys = (*KEYS, f"layout={layout}", *(["data.global_batch=6"] if "3" in layout else []))
    train_here(through, *keys)
    train_here(killed, *keys, kill_after=8)
    train_here(killed, *keys)
    assert rows(killed, "start")[-1]["step"] in (3, 6), "it started over instead of resuming"
    assert steps(killed) == steps(through)
    assert len(steps(through)) == STEPS
    assert_same_bits(tensors(last_commit(killed)), tensors(last_commit(through)))


@pytest.mark.parametrize("before", LAYOUTS)
def test_a_run_goes_on_under_every_other_layout(before, tmp_path):
    one, first = tmp_path / "one", tmp_path / "first"
    train_here(one, *KEYS)
    train_here(first, *KEYS, f"layout={before}", kill_after=8)
    for after in LAYOUTS:
        run = tmp_path / after
        shutil.copytree(first, run)
        train_here(run, *KEYS, f"layout={after}")
        assert [row["layout"] for row in rows(run, "start")] == [before, after]
        for a, b in zip(rows(run, "step"), rows(one, "step"), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_the_command_killed_with_its_ranks_resumes_bit_for_bit(tmp_path):
    through, killed = tmp_path / "through", tmp_path / "killed"
    train_here(through, *KEYS, "layout=dp2")
    code, _ = interrupt_after(killed, 8, signal.SIGKILL, *KEYS, "layout=dp2")
    assert code == -signal.SIGKILL
    result = train(killed, *KEYS, "layout=dp2")
    assert result.returncode == 0, result.stderr
    assert steps(killed) == steps(through)


def test_sigterm_finishes_the_step_commits_and_exits_well(tmp_path):
    code, out = interrupt_after(tmp_path, 4, signal.SIGTERM, *KEYS, "run.steps=2000", "layout=dp2")
    assert code == 0, out
    last = steps(tmp_path)[-1][0]
    assert rows(tmp_path)[-1] | {"time": 0} == {"kind": "end", "step": last, "reason": "preempted", "time": 0}
    assert open_commit(tmp_path / "checkpoints" / f"step-{last:08d}").step == last
    assert "the same command goes on from here" in out


def test_a_finished_run_says_so_and_changes_nothing(tmp_path):
    train_here(tmp_path, "run.steps=2")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    result = train(tmp_path, "run.steps=2")
    assert result.returncode == 0
    assert "complete" in result.stdout
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_another_recipe_may_not_continue_a_run_and_every_changed_key_is_named(tmp_path):
    train_here(tmp_path, "run.steps=2")
    result = train(tmp_path, "run.steps=3", "run.seed=7", "optimizer.lr=0.5", "data.num_workers=0")
    assert result.returncode == 2
    assert "run.seed: 0 there, 7 here" in result.stderr
    assert "optimizer.lr: 0.003 there, 0.5 here" in result.stderr
    assert "num_workers" not in result.stderr
    assert [row["step"] for row in rows(tmp_path, "step")] == [1, 2]


def test_a_stop_before_the_first_step_leaves_no_commit_and_a_run_that_can_begin(tmp_path):
    def stop_while_validating():
        from drumline.train import loop

        real = loop.validate

        def validate(*arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            return real(*arguments)

        loop.validate = validate

    train_here(tmp_path, *KEYS, before=stop_while_validating)
    assert steps(tmp_path) == []
    assert not list((tmp_path / "checkpoints").iterdir())
    train_here(tmp_path, *KEYS)
    assert len(steps(tmp_path)) == STEPS


@pytest.mark.parametrize("after", ["dp2", "fsdp2.tp2", "tp4", "cp2.tp2"])
@pytest.mark.parametrize("vocabulary", [2048, 2049])
def test_what_tensor_parallel_ranks_wrote_is_read_bit_for_bit_under_another_layout(vocabulary, after, tmp_path):
    keys = (f"model.vocab_size={vocabulary}", "model.num_kv_heads=4", "run.steps=3")
    train_here(tmp_path, *keys, "layout=tp2")
    written = tmp_path / "checkpoints" / "step-00000003"
    assert tensors(written)["model.embedding.weight"].shape[0] == vocabulary
    again = tmp_path / "again"
    train_here(tmp_path, *keys, "run.steps=5", f"layout={after}", before=functools.partial(save_when_loaded, again))
    assert_same_bits(tensors(again / "step-00000003"), tensors(written))
    assert len(rows(tmp_path, "step")) == 5
