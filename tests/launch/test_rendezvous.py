"""The store of a launch: its port comes before the ranks, its thread after them."""

import os
import socket
import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from drumline.launch.detect import LaunchError
from drumline.launch.rendezvous import LOOPBACK, LocalRendezvous


def num_threads():
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def meeting():
    made = LocalRendezvous(0, 20.0)
    yield made
    made.shutdown()


def port_of(info):
    return int(info.bootstrap_store_info.master_port)


def dial(port):
    return TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=20))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted as Linux does")
def test_taking_a_port_starts_no_thread_that_a_fork_could_catch_with_a_lock(meeting):
    before = num_threads()
    meeting.next_rendezvous()
    assert num_threads() == before
    meeting.serve()
    assert num_threads() > before


def test_a_rank_that_dials_before_the_store_is_open_is_answered(meeting):
    port = port_of(meeting.next_rendezvous())
    found = []
    caller = threading.Thread(target=lambda: found.append(dial(port)))
    caller.start()
    meeting.serve()
    caller.join(20.0)
    (store,) = found
    store.set("key", "value")
    assert dial(port).get("key") == b"value"


def test_a_fixed_port_serves_one_attempt_after_another_with_a_new_store():
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    meeting = LocalRendezvous(port, 20.0)
    for _ in range(2):
        assert port_of(meeting.next_rendezvous()) == port
        meeting.serve()
        store = dial(port)
        assert not store.check(["key"])
        store.set("key", "value")
        del store
    meeting.shutdown()


def test_a_port_in_use_is_named(meeting):
    taken = port_of(meeting.next_rendezvous())
    with pytest.raises(LaunchError, match=f"port {taken} on {LOOPBACK} is in use"):
        LocalRendezvous(taken, 20.0).next_rendezvous()


def test_a_number_that_is_no_port_is_refused():
    with pytest.raises(LaunchError, match=r"port 70000 on .* cannot be used"):
        LocalRendezvous(70_000, 20.0).next_rendezvous()
