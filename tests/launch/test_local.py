"""Launching ranks on this machine: exit codes, the first failure, hangs, signals, restarts."""

import functools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks  # noqa: F401  (loads what ranks need, with one thread)

from drumline import comm
from drumline.launch import launch_local
from drumline.launch.detect import LaunchError
from drumline.recipe.errors import CheckFailed, DrumlineError


def rank() -> int:
    return int(os.environ["RANK"])


@pytest.fixture
def launch(tmp_path):
    """Launches an entry; gives the exit code and what was said."""
    said = []

    def run(entry, nproc=2, **options):
        code = launch_local(entry, nproc, log_dir=tmp_path / "logs", say=said.append, **options)
        return code, "\n".join(said)

    return run


def join(timeout_s=20.0):
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


def write_place(folder):
    join()
    total = torch.tensor([rank()])
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    text = " ".join(os.environ[name] for name in names)
    (Path(folder) / f"{rank()}").write_text(f"{text} sum={total.item()} threads={torch.get_num_threads()}")
    dist.destroy_process_group()


def test_each_rank_has_its_place_its_threads_and_a_world(launch, tmp_path):
    code, said = launch(functools.partial(write_place, tmp_path), 4, num_threads=1)
    assert (code, said) == (0, "")
    assert [(tmp_path / str(r)).read_text() for r in range(4)] == [f"{r} {r} 4 4 1 sum=6 threads=1" for r in range(4)]


def compute_with_all_threads():
    torch.randn(1 << 20).exp().sum()


def test_ranks_compute_with_several_threads_where_the_process_did_before(launch):
    torch.set_num_threads(2)
    compute_with_all_threads()
    assert launch(compute_with_all_threads, 2, num_threads=2, timeout_s=20.0) == (0, "")
    assert torch.get_num_threads() == 1


def test_spawned_ranks_have_a_world_too(launch, tmp_path):
    code, said = launch(functools.partial(write_place, tmp_path), 2, num_threads=1, device="cuda")
    assert (code, said) == (0, "")
    assert (tmp_path / "1").read_text() == "1 1 2 2 1 sum=1 threads=1"


def test_four_forked_ranks_start_within_seconds(launch):
    launch(int, 1)  # loads what a first launch loads
    start = time.monotonic()
    assert launch(int, 4)[0] == 0
    assert time.monotonic() - start < 4.0


def end_with(code):
    return code if rank() == 1 else 0


@pytest.mark.parametrize(("code", "carried"), [(0, 0), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_a_ranks_exit_code_is_the_launchs(launch, code, carried):
    assert launch(functools.partial(end_with, code))[0] == carried


def refuse(error, only_rank=None):
    if only_rank is None or rank() == only_rank:
        raise error


def test_a_wrong_request_is_said_once_whatever_the_number_of_ranks_and_leaves_nothing(launch, capfd, tmp_path):
    code, said = launch(functools.partial(refuse, DrumlineError("no such folder")), 4, max_restarts=2)
    assert (code, said) == (2, "no such folder")
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "logs").exists()


def test_a_failed_check_ends_with_1(launch):
    assert launch(functools.partial(refuse, CheckFailed("two runs differ"))) == (1, "two runs differ")


def fail_in_rank_1():
    join()
    if rank() == 1:
        raise ValueError("boom")
    dist.barrier()


def test_the_first_failing_rank_is_named_with_its_error_its_place_and_its_log(launch, tmp_path):
    start = time.monotonic()
    code, said = launch(fail_in_rank_1, 3)
    assert time.monotonic() - start < 8
    assert code == 3
    lines = said.splitlines()
    assert lines[0].startswith("rank 1 failed first: ValueError: boom (exit code 3, at ")
    assert "in fail_in_rank_1" in lines[0]
    assert lines[1] == f"  log: {tmp_path}/logs/rank-1.log"
    assert "ranks 0, 2" in lines[2]
    assert 'raise ValueError("boom")' in (tmp_path / "logs" / "rank-1.log").read_text()


def die_in_rank_1():
    join()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_takes_the_others_down_within_seconds_and_is_named(launch):
    start = time.monotonic()
    code, said = launch(die_in_rank_1)
    assert time.monotonic() - start < 8
    assert code == 3
    assert said.startswith("rank 1 failed first: killed by SIGKILL")
    assert "rank 0 lost the connection to it" in said


def hang_in_rank_1():
    join(timeout_s=2.0)
    if rank() == 1:
        time.sleep(100)
    dist.all_reduce(torch.zeros(1))


def test_a_hang_ends_at_the_collectives_timeout_and_the_hung_ranks_stack_is_in_its_log(launch, tmp_path):
    start = time.monotonic()
    code, said = launch(hang_in_rank_1)
    assert time.monotonic() - start < 15
    assert code == 3
    assert "rank 1 did not answer: rank 0 waited for it" in said
    assert "in hang_in_rank_1" in (tmp_path / "logs" / "rank-1.log").read_text()


def outstay():
    if rank() == 1:
        time.sleep(100)


def test_a_rank_that_outstays_the_others_is_ended(launch, tmp_path):
    code, said = launch(outstay, timeout_s=1.0)
    assert code == 3
    assert "rank 1 failed first: it did not end within 1 s of the first rank that finished" in said
    assert "in outstay" in (tmp_path / "logs" / "rank-1.log").read_text()


def fail_once(folder):
    place = comm.read_place()
    world = comm.join(place, torch.device("cpu"), 20.0)
    with open(Path(folder) / f"attempts-{place.rank}", "a") as file:
        file.write(f"{place.attempt}\n")
    if place.rank == 1 and place.attempt == 0:
        raise OSError("a passing fault")
    world.barrier()
    comm.leave()


@pytest.mark.parametrize("has_fixed_port", [False, True])
def test_failed_ranks_start_again_together_where_that_is_allowed(launch, tmp_path, has_fixed_port):
    port = 0
    if has_fixed_port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    code, said = launch(functools.partial(fail_once, tmp_path), max_restarts=1, port=port)
    assert code == 0
    assert "rank 1 failed first: OSError: a passing fault" in said
    assert "restart 1" in said
    assert (tmp_path / "attempts-0").read_text() == "0\n1\n"


def test_a_fault_that_stays_ends_after_the_allowed_restarts(launch):
    code, said = launch(fail_in_rank_1, max_restarts=2)
    assert code == 3
    assert said.count("rank 1 failed first") == 3
    assert said.count("starting all 2 ranks again") == 2


def test_a_port_in_use_is_a_clear_message(launch):
    holder = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(LaunchError, match=f"port {holder.port} on 127.0.0.1 is in use; leave the port out"):
        launch(int, port=holder.port)


def talk():
    print(f"error of {rank()}", file=sys.stderr)
    print(f"output of {rank()}", flush=True)
    os.write(2, b"from below\n")


def test_each_ranks_stderr_is_in_its_log_and_rank_0s_on_the_console_too(launch, tmp_path, capfd):
    assert launch(talk)[0] == 0
    captured = capfd.readouterr()
    assert captured.out == "output of 0\n"
    assert captured.err == "error of 0\nfrom below\n"
    logs = [(tmp_path / "logs" / f"rank-{r}.log").read_text().splitlines()[1:] for r in range(2)]
    assert logs == [["error of 0", "from below"], ["error of 1", "output of 1", "from below"]]


SIGNALLED = """
    import os, signal, sys, time
    from pathlib import Path
    from drumline.launch import launch_local

    folder, grace_s, is_deaf = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "deaf"

    def train():
        stop = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        signal.signal(signal.SIGINT, lambda *_: stop.append(1))
        (folder / f"ready-{os.environ['RANK']}").touch()
        while is_deaf or not stop:
            time.sleep(0.05)
        time.sleep(0.3)  # the rest of the step
        assert len(stop) == 1
        (folder / f"commit-{os.environ['RANK']}").touch()

    sys.exit(launch_local(train, 2, log_dir=folder / "logs", grace_s=grace_s))
"""


class Signalled:
    """A launcher in a process of its own, in a process group of its own."""

    def __init__(self, folder: Path, grace_s: float, kind: str = "attentive"):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SIGNALLED), str(folder), str(grace_s), kind],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + 60
        while not all((folder / f"ready-{r}").exists() for r in range(2)):
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        stderr = self.process.communicate(timeout=30)[1]
        return self.process.returncode, stderr

    @property
    def commits(self) -> int:
        return len(list(self.folder.glob("commit-*")))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_every_rank_finish_commit_and_end_with_0(tmp_path, number):
    launcher = Signalled(tmp_path, 30.0)
    os.killpg(launcher.process.pid, number)  # as the terminal does: to the whole group
    assert launcher.end() == (0, "")
    assert launcher.commits == 2


def test_a_second_signal_ends_the_ranks_at_once(tmp_path):
    launcher = Signalled(tmp_path, 30.0, "deaf")
    launcher.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    launcher.process.send_signal(signal.SIGINT)
    code, stderr = launcher.end()
    assert code == 128 + signal.SIGINT
    assert "a second signal came" in stderr
    assert "most recent call first" not in stderr
    assert launcher.commits == 0


def test_ranks_that_ignore_a_signal_are_ended_after_the_grace(tmp_path):
    launcher = Signalled(tmp_path, 1.0, "deaf")
    launcher.process.terminate()
    code, stderr = launcher.end()
    assert code == 128 + signal.SIGTERM
    assert "longer than 1 s" in stderr


def test_no_rank_outlives_a_killed_launcher(tmp_path):
    launcher = Signalled(tmp_path, 30.0)
    children = [
        int(p) for p in Path(f"/proc/{launcher.process.pid}/task/{launcher.process.pid}/children").read_text().split()
    ]
    assert len(children) >= 2
    launcher.process.kill()
    launcher.end()
    deadline = time.monotonic() + 5
    while any(
        Path(f"/proc/{child}").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text() for child in children
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_signal_before_the_ranks_can_answer_ends_them_and_says_so(tmp_path):
    code = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from drumline.launch import launch_local
        def train():
            Path({str(tmp_path)!r}, "ready").touch()
            time.sleep(100)
        sys.exit(launch_local(train, 2, log_dir=Path({str(tmp_path)!r}) / "logs"))
    """)
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    process.terminate()
    stderr = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert stderr == "stopped by SIGTERM before the ranks could answer it\n"
