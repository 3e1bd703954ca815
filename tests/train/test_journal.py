"""metrics.jsonl: one row a record, numbers that can be compared bit for bit, and nothing from behind a resume."""

import json
from pathlib import Path

from drumline.train.journal import Journal
from drumline.train.records import CommitRecord, EndRecord, StartRecord, StepRecord, ValidationRecord


def start(step):
    return StartRecord(step, 9, "dp1", 1, None, "attention", None)


def step(number, loss=1.5):
    return StepRecord(number, loss, 0.1, 1e-3, 100, 10.0, None, 5, 0.5)


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder, first_step, *records):
    journal = Journal(folder, first_step)
    for record in records:
        journal.observe(record)
    journal.close()


def test_hex_numbers_give_the_float_back_bit_for_bit(tmp_path):
    write(tmp_path, 0, step(1, loss=0.1 + 0.2))
    (row,) = read(tmp_path)
    assert float.fromhex(row["loss_hex"]) == 0.1 + 0.2
    assert float.fromhex(row["grad_norm_hex"]) == 0.1


def test_a_resume_forgets_what_lies_behind_its_commit(tmp_path):
    records = [start(0), ValidationRecord(0, 7.0, 5), *map(step, range(1, 6)), CommitRecord(3, Path("/c"), 9, 0.1)]
    write(tmp_path, 0, *records)
    write(tmp_path, 3, start(3), step(4))
    rows = read(tmp_path)
    assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2, 3, 4]
    assert [row["kind"] for row in rows].count("validation") == 1
    assert [row["path"] for row in rows if row["kind"] == "commit"] == ["/c"]


def test_a_run_that_starts_over_keeps_only_that_it_was_started_before(tmp_path):
    write(tmp_path, 0, start(0), ValidationRecord(0, 7.0, 5), step(1), EndRecord(0, "failed"))
    write(tmp_path, 0, start(0))
    assert [row["kind"] for row in read(tmp_path)] == ["start", "end", "start"]


def test_a_row_cut_off_by_a_kill_is_dropped(tmp_path):
    write(tmp_path, 0, start(0), step(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 2, "lo')
    write(tmp_path, 1, start(1))
    assert [row["kind"] for row in read(tmp_path)] == ["start", "step", "start"]
