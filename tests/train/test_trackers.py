"""Optional observers, on real runs."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.train.runs import rows, train_here

from drumline.train.trackers import parse_range


def test_a_profile_is_a_chrome_trace_of_the_chosen_steps(tmp_path):
    train_here(tmp_path, "run.steps=5", "run.profile=2:3", "layout=dp2")
    for rank in range(2):
        trace = json.loads((tmp_path / "profile" / f"steps-2-3-rank-{rank}.json").read_text())
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert sum("AdamW.step" in name for name in names) == 2
        assert any("gloo" in name for name in names)


def test_tensorboard_holds_the_rows_of_the_metrics_across_a_resume(tmp_path):
    keys = ("run.steps=8", "checkpoint.every=3", "metrics.tensorboard=true")
    train_here(tmp_path, *keys, kill_after=5)
    train_here(tmp_path, *keys)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("train/loss")}
    assert found == pytest.approx({row["step"]: row["loss"] for row in rows(tmp_path, "step")})
    assert len(events.Scalars("train/loss")) == 8
    assert [event.step for event in events.Scalars("validation/loss")] == [0, 8]


def test_a_range_has_both_ends():
    assert parse_range("2:3") == (2, 3)
