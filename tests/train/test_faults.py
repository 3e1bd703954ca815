"""What goes wrong ends the run with one message, before any weight has moved and with nothing half-written."""

import os
import signal
import subprocess
import time

import psutil
import pytest
import torch
from tests.train.runs import command, environment, interrupt_after, rows, train, train_here

from drumline.checkpoint import open_commit
from drumline.models.layers import FeedForward


def poison(where, step, rank, micro_batches=2, layers=2):
    """Makes the output (or the gradient of the output) of the second layer's MLP NaN on one rank from one step on."""
    calls = 0

    def hook(module, args, output):
        nonlocal calls
        if not isinstance(module, FeedForward) or int(os.environ["RANK"]) != rank or not torch.is_grad_enabled():
            return None
        calls += 1
        if calls <= (step - 1) * micro_batches * layers or calls % layers:
            return None
        if where == "forward":
            return output * float("nan")
        output.register_hook(lambda grad: grad * float("nan"))
        return None

    torch.nn.modules.module.register_module_forward_hook(hook)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("forward", "first not finite on rank 1: output of layers.1.mlp (micro-batch 0)"),
        ("backward", "first not finite on rank 1: gradient of the output of layers.1.mlp (micro-batch 0)"),
    ],
)
@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_what_is_not_finite_stops_before_the_step_and_names_rank_and_module(where, says, layout, tmp_path):
    keys = ("run.steps=6", "data.micro_batch=2", "checkpoint.every=1", f"layout={layout}")
    with pytest.raises(AssertionError) as caught:
        train_here(tmp_path, *keys, before=lambda: poison(where, step=3, rank=1))
    message = str(caught.value)
    assert "NonFiniteError: step 3: loss" in message
    assert "stopped before the optimizer step" in message
    assert says in message
    assert rows(tmp_path)[-1]["reason"] == "failed"
    # The last commit is the one before the fault.
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))[-1] == "step-00000002"


@pytest.mark.parametrize(
    ("where", "rank", "says"),
    [
        ("forward", 0, "rank 0: output of layers.0.mlp (micro-batch 1)"),
        ("forward", 1, "rank 1: output of layers.1.mlp (micro-batch 1)"),
        ("backward", 0, "rank 0: gradient of the output of layers.0.mlp (micro-batch 1)"),
    ],
)
def test_what_is_not_finite_in_a_pipeline_is_named_by_the_stage_where_it_began(where, rank, says, tmp_path):
    # One layer a stage: the rank's second layer call of a step is its second micro-batch.
    keys = ("run.steps=6", "data.micro_batch=2", "layout=pp2", "layout.pp_schedule=gpipe")
    with pytest.raises(AssertionError) as caught:
        train_here(tmp_path, *keys, before=lambda: poison(where, step=3, rank=rank, micro_batches=2, layers=2))
    assert f"first not finite on {says}" in str(caught.value)


def test_a_failed_check_ends_the_command_with_1_and_one_message(tmp_path):
    result = train(tmp_path, "run.steps=6", "optimizer.lr=1e37", "schedule.warmup_steps=0", "layout=dp2")
    assert result.returncode == 1
    assert result.stderr.count("stopped before the optimizer step") == 1
    assert "Traceback" not in result.stderr


def signal_last_rank(run_dir, number, *overrides):
    """Runs, sends the rank that was started last a signal after three steps, and says how long the end took."""
    process = subprocess.Popen(
        command(run_dir, "run.steps=20000", *overrides),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while len(rows(run_dir, "step")) < 3:
            assert process.poll() is None
            time.sleep(0.01)
        ranks = [child for child in psutil.Process(process.pid).children() if child.status() != psutil.STATUS_ZOMBIE]
        max(ranks, key=lambda child: child.create_time()).send_signal(number)
        began = time.monotonic()
        _, stderr = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    return process.returncode, time.monotonic() - began, stderr


def test_a_rank_that_dies_takes_the_others_down_and_is_named(tmp_path):
    code, seconds, stderr = signal_last_rank(tmp_path, signal.SIGKILL, "layout=dp2")
    assert code == 3
    assert seconds < 15
    assert "failed first" in stderr.splitlines()[0]
    assert "SIGKILL" in stderr.splitlines()[0]
    assert "Traceback" not in stderr


@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2", "fsdp2", "cp2"])
def test_a_rank_that_hangs_ends_the_run_at_its_timeout_in_any_group(layout, tmp_path):
    keys = (f"layout={layout}", "resilience.timeout_s=5", "checkpoint.every=0")
    code, seconds, stderr = signal_last_rank(tmp_path, signal.SIGSTOP, *keys)
    assert code == 3
    assert seconds < 30
    assert "did not answer" in stderr.splitlines()[0]


def test_a_commit_that_finds_no_room_is_said_once_and_leaves_nothing(tmp_path):
    keys = ("run.steps=6", "checkpoint.every=2")
    prepared = train(tmp_path / "prepared", *keys)  # data and kernels are there from now on
    assert prepared.returncode == 0, prepared.stderr
    # A file may have 64 KiB: a disk that is full for a checkpoint, and not for a row of metrics.
    limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", *command(tmp_path / "run", *keys)]
    result = subprocess.run(limited, env=environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.count("step 2 was not committed") == 1
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_two_trainings_in_one_folder_are_refused(tmp_path):
    process = subprocess.Popen(
        command(tmp_path, "run.steps=20000"), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not rows(tmp_path, "step"):
            assert process.poll() is None
            time.sleep(0.01)
        result = train(tmp_path, "run.steps=20000")
    finally:
        process.kill()
        process.wait()
    assert result.returncode == 2
    assert f"another training (process {process.pid}) is writing to" in result.stderr


def test_a_damaged_commit_is_refused_by_name_and_left_alone(tmp_path):
    train_here(tmp_path, "run.steps=2")
    (shard,) = (tmp_path / "checkpoints" / "step-00000002").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    result = train(tmp_path, "run.steps=4")
    assert result.returncode in (1, 2)
    assert shard.name in result.stderr
    assert "to go on from an earlier commit" in result.stderr
    assert "Traceback" not in result.stderr
    assert bytes(content) == shard.read_bytes()


@pytest.mark.parametrize(
    ("overrides", "extra", "says"),
    [
        (["--nproc", "2"], {}, "layout"),
        (["layout=dp3"], {}, "data.global_batch"),
        (["layout=dp65536", "data.global_batch=65536"], {}, "too many for this machine"),
        (["numerics.blocks=2"], {}, "numerics.blocks = 2 is for numerics.mode = 'exact', not for 'default'"),
        (["numerics.mode=exact", "layout=dp8", "data.micro_batch=2"], {}, "each needs one"),
        (["run.device=cuda"], {}, "run.device"),
        (["data.sources=[{path='/nowhere'}]"], {}, "/nowhere"),
        (["model.vocab_size=100"], {}, "model.vocab_size"),
        (["metrics.wandb=p"], {}, "pip install 'drumline[wandb]'"),
        ([], {"RANK": "0"}, "WORLD_SIZE is not set"),
        ([], {"RANK": "7", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "rank 7 is outside a world of 2"),
        (["no.such=1"], {}, "no.such"),
        (["run.steps=-1"], {}, "run.steps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_request_that_cannot_run_gets_one_message_and_leaves_nothing(overrides, extra, says, tmp_path):
    if "run.device=cuda" in overrides and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    run = tmp_path / "run"
    result = train(run, "run.steps=2", *overrides, **extra)
    assert result.returncode == 2, result.stdout + result.stderr
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(run.glob("checkpoints/*"))
    assert not rows(run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_one_that_never_comes_can_be_ended(number, tmp_path):
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713"}
    process = subprocess.Popen(command(tmp_path, "layout=dp2"), env=environment(**place), stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "lock").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)  # from the lock to the wait inside torch
        process.send_signal(number)
        assert process.wait(timeout=15) == -number
    finally:
        if process.poll() is None:
            process.kill()


def test_ctrl_c_finishes_the_step_and_commits_it(tmp_path):
    code, _ = interrupt_after(tmp_path, 3, signal.SIGINT, "run.steps=20000", "checkpoint.every=1")
    assert code == 0
    assert open_commit(sorted((tmp_path / "checkpoints").glob("step-*"))[-1]).step >= 3
