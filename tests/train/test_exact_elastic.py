"""A run in exact mode that is killed again and again and goes on with other numbers of ranks has the bits of one that
was never touched.
"""

import itertools
import os
import random
import signal
import subprocess
import time

import pytest
from tests.train.runs import assert_same_bits, command, environment, steps, tensors, train, train_here

STEPS = 200
NUM_KILLS = 20
KEYS = (
    "numerics.mode=exact",
    "numerics.lanes=8",
    "data.seq_len=32",
    f"run.steps={STEPS}",
    "checkpoint.every=1",
    "run.validation_batches=0",
    # All that is random, packed or done beside the step.
    "model.dropout=0.1",
    "optimizer.state_dtype=bf16",
    "data.num_workers=3",
    "data.document_mask=true",
    "checkpoint.asynchronous=true",
)
CHAIN = ("dp1", "fsdp4", "dp2", "dp4.fsdp2", "dp3")
DEADLINE_S = 120.0


def kill_at_a_random_instant(run, layout, draw):
    """Starts the run, and kills all of its processes some time after it has taken a step more than there were."""
    process = subprocess.Popen(
        command(run, *KEYS, f"layout={layout}"),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    before, deadline = len(steps(run)), time.monotonic() + DEADLINE_S
    try:
        while len(steps(run)) <= before and process.poll() is None:
            assert time.monotonic() < deadline, f"{layout} takes no step"
            time.sleep(0.005)
        time.sleep(draw.uniform(0.0, 0.4))
        assert process.poll() is None, f"{layout} ended by itself"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_killed_at_random_under_five_numbers_of_ranks_has_the_bits_of_one_rank(tmp_path):
    draw = random.Random(0)
    whole, chained = tmp_path / "whole", tmp_path / "chained"
    train_here(whole, *KEYS)
    for layout, _ in zip(itertools.cycle(CHAIN), range(NUM_KILLS), strict=False):
        kill_at_a_random_instant(chained, layout, draw)
    assert len({row[0] for row in steps(chained)}) < STEPS
    result = train(chained, *KEYS, "layout=dp3", timeout_s=3 * DEADLINE_S)
    assert result.returncode == 0, result.stderr
    last = {step: (loss, norm) for step, loss, norm in steps(chained)}
    assert last == {step: (loss, norm) for step, loss, norm in steps(whole)}
    assert_same_bits(*(tensors(run / f"checkpoints/step-{STEPS:08d}") for run in (chained, whole)))


def test_a_run_goes_on_under_other_ranks_with_the_bits_of_one(tmp_path):
    whole, chained = tmp_path / "whole", tmp_path / "chained"
    few = (*KEYS, "run.steps=6", "checkpoint.asynchronous=false")
    train_here(whole, *few)
    train_here(chained, *few, "layout=dp3", kill_after=2)
    train_here(chained, *few, "layout=dp2.fsdp2", kill_after=4)
    train_here(chained, *few)
    assert {row[0]: row for row in steps(chained)} == {row[0]: row for row in steps(whole)}
    assert_same_bits(*(tensors(run / "checkpoints/step-00000006") for run in (chained, whole)))
