"""Files: what is written is there whatever its size and however it is written; what fails leaves nothing."""

import os
import threading

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from tests.storage.faults import FullFilesystem

from drumline.recipe.errors import DrumlineError
from drumline.storage import (
    Arena,
    Filesystem,
    aligned,
    bytes_of,
    checksum_of,
    digest_of,
    digest_of_file,
    dtype_of,
    header,
    name_of,
    place,
    read_header,
    read_range,
    write_bytes,
    write_file,
)

MIB = 1 << 20


def random_bytes(num_bytes: int) -> bytes:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 8 * MIB, 8 * MIB + 1, 16 * MIB, 17 * MIB + 123])
def test_a_file_of_any_size_is_written_whole_tail_included(tmp_path, num_bytes, direct):
    data = random_bytes(num_bytes)
    head = aligned(random_bytes(4096))
    result = write_file(Filesystem(), tmp_path / "f", [head, aligned(data)], direct=direct, meanwhile=lambda: "done")
    assert result == "done"
    assert (tmp_path / "f").read_bytes() == bytes(head) + data
    assert digest_of_file(tmp_path / "f") == digest_of([head, data])


def test_memory_that_is_not_aligned_is_written_all_the_same(tmp_path):
    data = memoryview(random_bytes(20 * MIB))[3:]
    write_file(Filesystem(), tmp_path / "f", [data], direct=True)
    assert (tmp_path / "f").read_bytes() == data


def test_a_filesystem_without_direct_writes_is_written_buffered(tmp_path):
    class Refusing(Filesystem):
        def create(self, path, *, direct=False):
            return super().create(path, direct=False)

    data = random_bytes(9 * MIB)
    write_file(Refusing(), tmp_path / "f", [aligned(data)], direct=True)
    assert (tmp_path / "f").read_bytes() == data


@pytest.mark.parametrize("room", [0, 1000, 10 * MIB])
def test_a_write_that_fails_raises_and_leaves_no_file_and_no_descriptor(tmp_path, room):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        write_file(FullFilesystem(room), tmp_path / "f", [memoryview(bytes(20 * MIB))])
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_failure_of_what_runs_meanwhile_is_raised(tmp_path):
    def fail():
        raise ValueError("meanwhile")

    with pytest.raises(ValueError, match="meanwhile"):
        write_file(Filesystem(), tmp_path / "f", [memoryview(bytes(20 * MIB))], meanwhile=fail)


def test_a_short_write_of_the_kernel_is_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:1000], offset))
    data = random_bytes(12_345)
    write_bytes(Filesystem(), tmp_path / "f", data)
    assert (tmp_path / "f").read_bytes() == data


def test_a_range_is_read_and_one_that_reaches_past_the_end_is_an_error(tmp_path):
    (tmp_path / "f").write_bytes(b"0123456789")
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        into = bytearray(4)
        read_range(fd, memoryview(into), 3)
        assert into == b"3456"
        with pytest.raises(OSError, match="ends 2 bytes too early"):
            read_range(fd, memoryview(into), 8)
    finally:
        os.close(fd)


def test_digests_are_xxh3():
    assert digest_of([b"drum", b"line"]) == xxhash.xxh3_128(b"drumline").hexdigest()
    assert checksum_of(b"drumline") == xxhash.xxh3_64(b"drumline").hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_tensors_bytes_are_a_view_that_writes_through(dtype):
    tensor = torch.zeros(3, 2, dtype=dtype)
    view = bytes_of(tensor)
    assert len(view) == tensor.nbytes
    view[:] = bytes([1]) * len(view)
    assert tensor.view(torch.uint8).eq(1).all()
    assert len(bytes_of(torch.empty(0, 3))) == 0
    assert len(bytes_of(torch.tensor(1.0))) == 4


def test_every_stored_dtype_has_one_name_and_what_has_none_is_refused():
    for name in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "U16", "BOOL"):
        assert name_of(dtype_of(name)) == name
    with pytest.raises(DrumlineError, match="complex64 cannot be stored"):
        name_of(torch.complex64)
    with pytest.raises(DrumlineError, match="'X9' is not known"):
        dtype_of("X9")


def test_a_shard_made_here_is_read_by_safetensors_and_one_of_safetensors_is_read_here(tmp_path):
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.ones(5, dtype=torch.int64),
        "c": torch.ones(3).bfloat16(),
        "e": torch.empty(0),
    }
    placed = place([(key, name_of(tensor.dtype), tuple(tensor.shape)) for key, tensor in tensors.items()])
    data = b"".join(bytes(bytes_of(tensors[stored.key])) for stored in placed)
    (tmp_path / "ours").write_bytes(header(placed, {"x": "y"}) + data)
    loaded = load_file(tmp_path / "ours")
    assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())
    save_file(tensors, tmp_path / "theirs")
    found, data_start = read_header(tmp_path / "theirs")
    content = (tmp_path / "theirs").read_bytes()[data_start:]
    assert {stored.key: content[stored.start : stored.end] for stored in found} == {
        key: bytes(bytes_of(tensor)) for key, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        b"\xff" * 16,
        (2).to_bytes(8, "little") + b"[]",
        (100).to_bytes(8, "little") + b"{",
        (4).to_bytes(8, "little") + b"\xff\xfe{}",
        (2).to_bytes(8, "little") + b"{}extra",
    ],
)
def test_what_is_no_safetensors_file_is_refused_with_its_name(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(DrumlineError, match="f "):
        read_header(tmp_path / "f")


def test_the_arena_is_page_aligned_reused_and_grows():
    arena = Arena()
    arena.reserve(1000, pin=False)
    first = arena.view(8, (5,), torch.float32)
    first.fill_(1.0)
    arena.reserve(500, pin=False)
    assert arena.view(0, (1,), torch.uint8).data_ptr() % 4096 == 0
    assert arena.view(8, (5,), torch.float32).sum() == 5.0
    arena.reserve(100_000, pin=False)
    assert arena.num_bytes >= 100_000
    assert first.sum() == 5.0, "a view keeps the memory it lies in"


def test_names_are_swapped_at_once_or_not_at_all(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    if Filesystem().exchange(tmp_path / "a", tmp_path / "b"):
        assert (tmp_path / "a" / "b").exists()
    with pytest.raises(FileNotFoundError):
        Filesystem().exchange(tmp_path / "a", tmp_path / "missing")


def test_writing_leaves_the_interpreter_free(tmp_path):
    counted = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1

    data = aligned(bytes(64 * MIB))
    counter = threading.Thread(target=count)
    counter.start()
    write_file(Filesystem(), tmp_path / "f", [data], direct=True, meanwhile=lambda: digest_of([data]))
    stop.set()
    counter.join()
    assert counted > 1000
