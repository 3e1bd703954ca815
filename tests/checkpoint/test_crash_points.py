"""A save that is killed at any operation, on any rank, leaves a newest commit that is whole."""

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.storage.faults import DyingFilesystem, Killed, PowerCutFilesystem

from drumline.checkpoint import Piece, SaveError, Saver, newest_commit, open_commit, whole
from drumline.storage import Filesystem

torch.set_num_threads(1)  # a child forked from a parent with a pool of threads hangs when it computes with several

NAMES = ("model.a", "model.b", "optimizer.a.exp_avg")


class FastFilesystem(Filesystem):
    """For what happens before and after the crash: it syncs nothing, and so is quick."""

    def sync(self, fd):
        return None

    def sync_folder(self, path):
        return None


class NoExchange(FastFilesystem):
    """A filesystem that cannot swap two names."""

    def exchange(self, one, other):
        return False


class DyingNoExchange(DyingFilesystem):
    """The same, and it dies."""

    def exchange(self, one, other):
        return False


def pieces_of(value: float) -> list[Piece]:
    return [whole(name, torch.full((5, 3), value)) for name in NAMES]


def values_of(path: Path) -> set[float]:
    """The values in a commit, every byte of it verified; one value if it is of one save."""
    return {float(value) for _, tensor in open_commit(path).tensors() for value in tensor.flatten()}


def filesystems(num_operations: int):
    yield DyingFilesystem(num_operations)
    yield PowerCutFilesystem(num_operations, loses_names=True)
    yield PowerCutFilesystem(num_operations, loses_names=False)


def save_and_die(directory: Path, step: int, value: float, filesystem: Filesystem, keep: int) -> bool:
    """Whether the save was reported as done."""
    try:
        saver = Saver(directory, filesystem=filesystem, keep=keep, session=f"s{step}{value:g}")
        saver.save(step, pieces_of(value), {"value": value}).wait()
    except (Killed, SaveError):
        return False
    return True


def restart_and_save(directory: Path, step: int) -> None:
    with Saver(directory, keep=2, filesystem=FastFilesystem()) as saver:
        assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]
        saver.save(step, pieces_of(99.0), {}).wait()
    assert values_of(newest_commit(directory)) == {99.0}


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["kill", "power-cut", "power-cut-that-keeps-names"])
def test_a_save_stopped_after_any_operation_leaves_the_old_or_the_new_commit(tmp_path, kind):
    for num_operations in range(1, 200):
        directory = tmp_path / str(num_operations)
        with Saver(directory, filesystem=FastFilesystem()) as saver:
            saver.save(1, pieces_of(1.0), {})
            saver.save(2, pieces_of(2.0), {})
        filesystem = list(filesystems(num_operations))[kind]
        was_done = save_and_die(directory, 3, 3.0, filesystem, keep=1)
        warnings = []
        newest = newest_commit(directory, warnings.append)
        assert newest is not None, num_operations
        assert not warnings, (num_operations, warnings)
        assert values_of(newest) == ({3.0} if newest.name == "step-00000003" else {2.0}), num_operations
        assert newest.name == "step-00000003" or not was_done
        is_over = not filesystem.is_dead
        restart_and_save(directory, 4)
        if is_over:
            break
    assert is_over
    assert num_operations > 20
    assert {path.name for path in directory.iterdir()} == {"step-00000003", "step-00000004"}


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["kill", "power-cut", "power-cut-that-keeps-names"])
def test_saving_a_step_again_stopped_anywhere_leaves_one_of_both(tmp_path, kind):
    for num_operations in range(1, 200):
        directory = tmp_path / str(num_operations)
        with Saver(directory, filesystem=FastFilesystem()) as saver:
            saver.save(1, pieces_of(1.0), {})
        filesystem = list(filesystems(num_operations))[kind]
        was_done = save_and_die(directory, 1, 2.0, filesystem, keep=1)
        newest = newest_commit(directory)
        assert newest is not None, num_operations
        assert values_of(newest) in ([{2.0}] if was_done else [{1.0}, {2.0}]), num_operations
        is_over = not filesystem.is_dead
        restart_and_save(directory, 2)
        if is_over:
            break
    assert is_over


def test_saving_a_step_again_where_names_cannot_be_swapped_is_put_right_at_the_next_start(tmp_path):
    for num_operations in range(1, 200):
        directory = tmp_path / str(num_operations)
        with Saver(directory, filesystem=NoExchange()) as saver:
            saver.save(1, pieces_of(1.0), {})
        filesystem = DyingNoExchange(num_operations)
        save_and_die(directory, 1, 2.0, filesystem, keep=1)
        Saver(directory).close()
        newest = newest_commit(directory)
        assert newest is not None, num_operations
        assert values_of(newest) in ({1.0}, {2.0})
        if not filesystem.is_dead:
            break
    assert values_of(newest) == {2.0}


@pytest.mark.parametrize("dying_rank", [0, 1])
def test_a_rank_that_dies_at_any_operation_leaves_the_old_or_the_new_commit(tmp_path, dying_rank):
    def save(step: int, session: str, filesystems: list[Filesystem], directory: Path) -> list[BaseException | None]:
        outcomes: list[BaseException | None] = [None, None]

        def run(rank: int) -> None:
            try:
                saver = Saver(
                    directory,
                    rank=rank,
                    world_size=2,
                    session=session,
                    timeout_s=0.15 if step == 2 else 60,
                    filesystem=filesystems[rank],
                    keep=1,
                )
                saver.save(step, [Piece("model.a", (4,), (2 * rank,), torch.full((2,), float(step)))], {}).wait()
            except BaseException as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    for num_operations in range(1, 100):
        directory = tmp_path / str(num_operations)
        assert save(1, "r", [FastFilesystem(), FastFilesystem()], directory) == [None, None]
        filesystem = DyingFilesystem(num_operations)
        living = FastFilesystem()
        outcomes = save(2, "s", [filesystem, living] if dying_rank == 0 else [living, filesystem], directory)
        newest = newest_commit(directory)
        assert newest is not None
        assert values_of(newest) == ({2.0} if newest.name == "step-00000002" else {1.0})
        if newest.name == "step-00000001":
            assert isinstance(outcomes[1 - dying_rank], SaveError), "the living rank reports it"
            assert f"rank {dying_rank}" in str(outcomes[1 - dying_rank])
        if not filesystem.is_dead:
            assert outcomes == [None, None]
            break
    assert not filesystem.is_dead


def test_a_process_killed_at_a_random_instant_leaves_a_whole_newest_commit(tmp_path):
    chance = random.Random(0)
    for trial in range(4):
        directory = tmp_path / str(trial)
        pid = os.fork()
        if pid == 0:
            try:
                tensors = [torch.full((100, 1000), 1.0) for _ in NAMES]
                with Saver(directory, keep=2, asynchronous=True) as saver:
                    for step in range(1, 10_000):
                        saver.save(step, [whole(n, t) for n, t in zip(NAMES, tensors, strict=True)], {"step": step})
                        for tensor in tensors:
                            tensor.add_(1.0)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 20
        while newest_commit(directory, lambda problem: None) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        newest = newest_commit(directory)
        assert newest is not None
        assert values_of(newest) == {float(open_commit(newest).step)}
        left = [path for path in directory.iterdir() if path.name.startswith(".")]
        assert len(left) <= 2
        Saver(directory).close()
        assert not [path for path in directory.iterdir() if path.name.startswith(".")]
        shutil.rmtree(directory)


def test_a_save_under_way_is_not_taken_for_a_commit_and_a_crashed_start_is_cleaned(tmp_path):
    stale = tmp_path / ".tmp-step-00000007-dead-0001"
    stale.mkdir()
    (stale / "COMMITTED").write_text("{}")
    foreign = tmp_path / ".tmp-of-somebody-else"
    foreign.mkdir()
    assert newest_commit(tmp_path) is None
    Saver(tmp_path).close()
    assert not stale.exists()
    assert foreign.exists()
