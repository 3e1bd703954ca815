"""What a person sees."""

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from drumline.train.console import ConsoleView, show_bytes
from drumline.train.records import CommitRecord, EndRecord, RouterRecord, StartRecord, StepRecord, ValidationRecord


def shown(*records, log_every=1, terminal=False):
    out = io.StringIO()
    view = ConsoleView(Console(file=out, force_terminal=terminal, width=60), log_every)
    for record in records:
        view.observe(record)
    view.close()
    return out.getvalue()


START = StartRecord(2, 9, "dp2", 2, Path("/runs/[x]/step-2"), "attention: SDPA", 2e12)


def step(number):
    return StepRecord(number, 1.25, 0.5, 1e-3, 90, 1234.5, 0.25, 3 * 2**30, 0.1)


def test_a_step_is_one_line_whatever_the_width():
    (line,) = shown(step(3)).splitlines()
    for part in ("step 3", "loss 1.2500", "grad norm 0.500", "lr 1.00e-03", "1,234 tokens/s", "25.0%", "3.0 GiB"):
        assert part in line


def test_a_step_says_the_loss_of_tokens_further_ahead_where_there_is_one():
    assert "mtp loss 2.5000" in shown(replace(step(3), mtp_loss=2.5))
    assert "mtp" not in shown(step(3))


def test_a_step_with_experts_says_the_worst_loads_and_what_was_dropped():
    router = RouterRecord((0, 1), (1.5, 3.0), (0.5, 0.25), (1.0, 2.0), (0.0, 0.5), None)
    assert "expert load 0.25 to 3.00  dropped 25.0%" in shown(replace(step(3), router=router))
    assert "dropped" not in shown(replace(step(3), router=replace(router, dropped=(0.0, 0.0))))
    assert "expert" not in shown(step(3))


def test_the_start_says_layout_attention_peak_and_origin_with_brackets_as_they_are():
    text = shown(START)
    assert "layout dp2 on 2 ranks, attention: SDPA, 2.00 TFLOP/s peak" in text
    assert "steps 3 to 9, resumed from /runs/[x]/step-2" in text


def test_log_every_thins_lines_but_keeps_the_last_step():
    text = shown(START, *map(step, range(3, 10)), log_every=4)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("step ")] == ["4/9", "8/9", "9/9"]


def test_a_terminal_gets_a_bar_and_a_file_none():
    assert "ETA" in shown(START, step(3), terminal=True)
    assert "ETA" not in shown(START, step(3))


def test_other_records_are_said_too():
    text = shown(
        START, ValidationRecord(3, 800.0, 5), CommitRecord(3, Path("/c"), 2048, 0.001), EndRecord(4, "preempted")
    )
    assert "perplexity inf" in text
    assert "commit at step 3: 2.0 KiB, waited 1 ms" in text
    assert "stopped after step 4 of 9, committed; the same command goes on from here" in text


def test_bytes_are_shown_in_the_unit_that_reads_best():
    assert [show_bytes(n) for n in (5, 2048, 5 * 2**20, 2**40)] == ["5 B", "2.0 KiB", "5.0 MiB", "1.0 TiB"]
