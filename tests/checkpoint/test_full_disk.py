"""A disk that is full at whatever byte: the save fails with a clear message, and earlier commits are untouched."""

import os
import resource
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from tests.storage.faults import FullFilesystem

from drumline.checkpoint import Piece, SaveError, Saver, newest_commit, open_commit, whole
from drumline.storage import Filesystem


def test_a_disk_that_is_full_after_any_byte_fails_the_save_and_leaves_the_last_commit(tmp_path):
    pieces = [whole(f"model.{i}", torch.ones(500)) for i in range(4)]
    num_failed = 0
    with Saver(tmp_path) as saver:
        saver.save(1, pieces, {}).wait()
    for room in range(0, 40_000, 701):
        with Saver(tmp_path, filesystem=FullFilesystem(room), keep=9) as saver:
            handle = saver.save(2, pieces, {})
            handle.settle()
            if handle.error is None:
                break
            with pytest.raises(SaveError) as caught:
                handle.wait()
        num_failed += 1
        said = ("step 2 was not committed", "No space left", "bytes to write", "untouched", "step-00000001")
        assert all(part in str(caught.value) for part in said)
        assert newest_commit(tmp_path) == tmp_path / "step-00000001"
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"], "what was written is removed"
    assert num_failed > 10
    assert open_commit(newest_commit(tmp_path)).step == 2


def test_after_a_full_disk_the_same_saver_goes_on_once_there_is_room(tmp_path):
    filesystem = FullFilesystem(3000)
    with Saver(tmp_path, filesystem=filesystem, asynchronous=True) as saver:
        handle = saver.save(1, [whole("model.a", torch.ones(5000))], {})
        with pytest.raises(SaveError):
            handle.wait()
        filesystem.room = 10**9
        saver.save(2, [whole("model.a", torch.ones(5000))], {}).wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_full_disk_of_one_rank_is_reported_by_all(tmp_path):
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        filesystem = FullFilesystem(5000) if rank == 1 else Filesystem()
        saver = Saver(tmp_path, rank=rank, world_size=3, session="s", filesystem=filesystem, timeout_s=20)
        try:
            saver.save(1, [Piece("model.a", (6000,), (2000 * rank,), torch.ones(2000))], {}).wait()
        except SaveError as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(errors) == {0, 1, 2}
    assert all("No space left" in str(error) and "rank 1 wrote" in str(error) for error in errors.values())
    assert newest_commit(tmp_path) is None
    assert not list(tmp_path.glob(".*/*.safetensors"))


def in_a_child(body) -> int:
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            torch.set_num_threads(1)
            code = body()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save_and_tell(directory: Path, step: int, num_elements: int) -> int:
    try:
        with Saver(directory) as saver:
            saver.save(step, [whole("model.a", torch.ones(num_elements))], {}).wait()
    except SaveError as error:
        return 1 if "was not committed" in str(error) and "Earlier commits are untouched" in str(error) else 98
    return 0


def test_a_file_size_limit_of_the_system_is_a_clear_error(tmp_path):
    def limited() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        return save_and_tell(tmp_path, 2, 1 << 16)

    assert in_a_child(lambda: save_and_tell(tmp_path, 1, 100)) == 0
    assert in_a_child(limited) == 1
    assert newest_commit(tmp_path) == tmp_path / "step-00000001"


def test_a_small_filesystem_that_fills_up_keeps_its_last_commit(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("tmpfs cannot be mounted here; the limit on file sizes and the simulated disk are tested above")
    try:
        assert in_a_child(lambda: save_and_tell(tmp_path, 1, 50_000)) == 0
        assert in_a_child(lambda: save_and_tell(tmp_path, 2, 400_000)) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        assert float(open_commit(newest_commit(tmp_path)).tensor("model.a").sum()) == 50_000
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path):
    class ReadOnly(Filesystem):
        def make_folder(self, path):
            raise OSError(30, "Read-only file system")

    with pytest.raises(SaveError, match=r"commits cannot be kept in .*: Read-only file system"):
        Saver(tmp_path / "checkpoints", filesystem=ReadOnly())
