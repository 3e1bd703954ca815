"""The message about failed ranks names the cause first."""

from pathlib import Path

import pytest

from drumline.launch.failure import RankExit, Report, describe, exit_code, first_failure

LOGS = {rank: Path(f"logs/rank-{rank}.log") for rank in range(8)}
LOST = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3311"


def report(message, time_s=1.0, kind="RuntimeError", is_request_error=False):
    return Report(kind, message, "step.py:41 in train_step", time_s, is_request_error)


def test_the_cause_is_the_killed_rank_although_its_peers_were_seen_to_fail_before():
    exits = [RankExit(0, 3, 5.0, report(LOST, 4.9)), RankExit(1, -9, 5.1)]
    assert first_failure(exits).rank == 1


def test_the_cause_is_the_earliest_own_failure():
    exits = [RankExit(0, 3, 5.0, report("late", 4.9)), RankExit(2, 3, 5.2, report("early", 4.1)), RankExit(3, 0, 1.0)]
    assert first_failure(exits).rank == 2


def test_a_rank_that_the_launcher_stopped_is_never_the_cause():
    exits = [RankExit(0, -9, 1.0, is_stopped=True), RankExit(1, 3, 2.0, report("boom"))]
    assert first_failure(exits).rank == 1


def test_lost_peers_and_stopped_ranks_take_one_line_after_the_cause():
    exits = [
        RankExit(1, -9, 5.0),
        *(RankExit(rank, 3, 5.1, report(LOST)) for rank in (0, 2, 3, 5)),
        RankExit(4, -9, 6.0, is_stopped=True),
    ]
    assert describe(exits, LOGS).splitlines() == [
        "rank 1 failed first: killed by SIGKILL; Linux kills a process so when memory runs out",
        "  log: logs/rank-1.log",
        "  after it: ranks 0, 2-3, 5 lost the connection to it; "
        "rank 4 still ran and had to be stopped (the log has the stack)",
    ]


@pytest.mark.parametrize(
    "said", ["Timed out waiting 2000ms for recv operation to complete", "Watchdog caught collective operation timeout"]
)
def test_a_rank_that_waited_in_vain_is_not_blamed_but_those_that_did_not_answer(said):
    exits = [RankExit(0, 3, 5.0, report(said)), RankExit(1, -9, 6.0, is_stopped=True)]
    assert describe(exits, LOGS).splitlines() == [
        "rank 1 did not answer: rank 0 waited for it longer than it may (resilience.timeout_s)",
        "  log: logs/rank-1.log (with the stack, where a rank could still write it)",
        f"  rank 0: RuntimeError: {said} (exit code 3, at step.py:41 in train_step)",
    ]
    more = [*exits, RankExit(3, -9, 6.0, is_stopped=True)]
    assert describe(more, LOGS).startswith(
        "ranks 1, 3 did not answer: rank 0 waited for one of them longer than it may"
    )


def test_a_wrong_request_is_said_once_and_bare():
    exits = [RankExit(rank, 2, 1.0, report("data.path = x is missing", is_request_error=True)) for rank in range(8)]
    assert describe(exits, LOGS) == "data.path = x is missing"


def test_a_wrong_request_that_rank_0_found_alone_is_bare_too():
    exits = [RankExit(0, 2, 1.0, report("no data", is_request_error=True)), RankExit(1, -9, 2.0, is_stopped=True)]
    assert describe(exits, LOGS) == "no data"


def test_a_wrong_request_of_one_rank_names_it():
    exits = [
        RankExit(0, 3, 2.0, report(LOST)),
        RankExit(5, 2, 1.0, report("local rank 5 has no CUDA device", is_request_error=True)),
    ]
    assert describe(exits, LOGS) == "rank 5: local rank 5 has no CUDA device"


@pytest.mark.parametrize(("code", "carried"), [(0, 0), (1, 1), (2, 2), (3, 3), (17, 3), (-9, 3), (-15, 3)])
def test_exit_codes_of_ranks_are_carried_and_all_others_are_drumlines_fault(code, carried):
    assert exit_code(RankExit(0, code, 1.0)) == carried
