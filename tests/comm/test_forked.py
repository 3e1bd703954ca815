"""Forked ranks: whatever becomes of one is told, and nothing waits for it for ever."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from drumline.comm.forked import GRACE_S, ForkedRanks, in_one_line


def rank_one(does):
    """A body in which rank 1 does something and the others wait for it in a collective."""

    def body():
        if dist.get_rank() == 1:
            does()
        dist.all_reduce(torch.ones(1))

    return body


def failures_of(does, num_ranks=2, timeout_s=60.0):
    return ForkedRanks(num_ranks, rank_one(does), timeout_s).wait()


def raise_something():
    raise ValueError("what rank 1 has to say")


def test_ranks_that_finish_leave_no_failures_and_meet_each_other(tmp_path):
    def body():
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        (tmp_path / f"{dist.get_rank()}").write_text(f"{float(total)} of {os.environ['WORLD_SIZE']}")

    assert ForkedRanks(3, body).wait() == []
    assert [(tmp_path / f"{rank}").read_text() for rank in range(3)] == ["3.0 of 3"] * 3


def test_a_rank_that_raises_is_named_first_with_its_traceback():
    first, *rest = failures_of(raise_something)
    assert first.startswith("rank 1:\nTraceback")
    assert "in raise_something" in first
    assert in_one_line(first) == "ValueError: what rank 1 has to say"
    assert all(text.startswith("rank 0") for text in rest)


def test_a_message_of_several_lines_is_told_whole():
    def say():
        raise ValueError("what is wrong: 3\n  try: 4")

    first, *_ = failures_of(say)
    assert in_one_line(first) == "ValueError: what is wrong: 3 try: 4"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_rank_that_a_signal_ends_is_named_before_peers_that_lost_it(name):
    failures = failures_of(lambda: os.kill(os.getpid(), getattr(signal, name)))
    assert failures[0] == f"rank 1 was ended by {name}"


def test_a_rank_that_aborts_is_named_with_the_end_of_its_log(tmp_path):
    def abort():
        os.write(2, b"what a library has to say\n")
        os.abort()

    first, *_ = ForkedRanks(2, rank_one(abort), 60.0, log_dir=tmp_path).wait()
    assert first.startswith("rank 1 was ended by SIGABRT\n  what a library has to say\n")
    assert "in abort" in first
    assert in_one_line(first) == "rank 1 was ended by SIGABRT"


def test_a_rank_that_leaves_without_a_word_is_named_with_its_code():
    assert failures_of(lambda: os._exit(7))[0] == "rank 1 ended with code 7"


def test_ranks_that_hang_are_ended_at_the_time_that_they_have():
    began = time.monotonic()
    failures = failures_of(lambda: time.sleep(300), timeout_s=3.0)
    assert time.monotonic() - began < 3.0 + GRACE_S + 10.0
    assert "rank 1 did not finish and was killed" in failures


def test_a_rank_that_hangs_after_another_failed_gets_a_short_grace_only(tmp_path):
    def body():
        if dist.get_rank() == 1:
            # A rank that is still joining would raise, too, and not hang.
            while not (tmp_path / "joined").exists():
                time.sleep(0.01)
            raise_something()
        (tmp_path / "joined").touch()
        time.sleep(300)

    began = time.monotonic()
    failures = ForkedRanks(2, body, 120.0).wait()
    assert time.monotonic() - began < GRACE_S + 20.0
    assert "what rank 1 has to say" in failures[0]
    assert failures[1:] == ["rank 0 did not finish and was killed"]


def test_what_ranks_write_to_stderr_goes_to_their_logs(tmp_path):
    def body():
        os.write(2, f"here is rank {dist.get_rank()}\n".encode())

    assert ForkedRanks(2, body, log_dir=tmp_path).wait() == []
    assert [(tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1)] == ["here is rank 0\n", "here is rank 1\n"]


def test_ranks_compute_with_several_threads_where_the_process_did_before():
    def computes():
        torch.set_num_threads(2)
        torch.randn(1 << 20).exp().sum()

    computes()
    assert ForkedRanks(2, computes, 30.0).wait() == []
