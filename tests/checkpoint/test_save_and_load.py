"""Saving and loading across ranks and layouts, through the public names of the room."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.ranks import ranks

from drumline.checkpoint import CommitError, Piece, SaveError, Saver, newest_commit, open_commit, whole
from drumline.recipe.errors import DrumlineError

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def random_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"model.{str(dtype)[6:]}": (100 * torch.randn(13, 7, generator=generator)).to(dtype) for dtype in DTYPES}
    return tensors | {
        "optimizer.step": torch.tensor(7, dtype=torch.int64),
        "model.empty": torch.empty(0, 5),
        "model.vector": torch.randn(3, generator=generator),
        "model.cube": torch.randn(5, 3, 4, generator=generator),
        "model.strided": torch.randn(6, 9, generator=generator).t(),
    }


def empty_pieces(tensors: dict[str, torch.Tensor]) -> list[Piece]:
    return [whole(name, torch.zeros(tensor.shape, dtype=tensor.dtype)) for name, tensor in tensors.items()]


def assert_holds(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    commit = open_commit(path)
    assert commit.names == sorted(tensors)
    for name, tensor in commit.tensors():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name]), name


def row_shard(name: str, tensor: torch.Tensor, rank: int, degree: int, replicas: tuple[int, ...] = ()) -> Piece:
    """The rows that FSDP gives to a rank: chunks of ceil(rows / degree), the last ones smaller or empty."""
    if tensor.ndim == 0:
        return whole(name, tensor, replicas)
    rows = -(-tensor.shape[0] // degree)
    start = min(rank * rows, tensor.shape[0])
    part = tensor[start : start + rows]
    return Piece(name, tuple(tensor.shape), (start, *(0 for _ in tensor.shape[1:])), part, replicas)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, asynchronous):
    tensors = random_tensors()
    pieces = [whole(name, tensor) for name, tensor in tensors.items()]
    with Saver(tmp_path, asynchronous=asynchronous, recipe={"a": 1}, environment={"b": 2}) as saver:
        path = saver.save(10, pieces, {"position": 5}).wait()
    assert path == tmp_path / "step-00000010"
    assert_holds(path, tensors)
    commit = open_commit(path)
    assert (commit.step, commit.state, commit.recipe, commit.environment) == (10, {"position": 5}, {"a": 1}, {"b": 2})
    wanted = empty_pieces(tensors)
    commit.read_into(wanted)
    assert all(torch.equal(piece.tensor, tensors[piece.name]) for piece in wanted)


def test_a_shard_is_a_valid_safetensors_file_with_aligned_data(tmp_path):
    tensors = random_tensors()
    with Saver(tmp_path) as saver:
        path = saver.save(1, [whole(name, tensor) for name, tensor in tensors.items()], {}).wait()
    shard = path / "shard-00000-of-00001.safetensors"
    loaded = load_file(shard)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    header_bytes = int.from_bytes(shard.read_bytes()[:8], "little")
    assert (8 + header_bytes) % 4096 == 0


def test_a_commit_holds_the_values_of_the_call_though_tensors_change_right_after(tmp_path):
    tensors = {f"model.{i}": torch.full((300, 1000), float(i)) for i in range(20)}
    pieces = [whole(name, tensor) for name, tensor in tensors.items()]
    with Saver(tmp_path, asynchronous=True, keep=10) as saver:
        paths = []
        for step in range(1, 4):
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            paths.append((saver.save(step, pieces, {"step": step}).path, before))
            for tensor in tensors.values():
                tensor.add_(1000.0)
    for path, before in paths:
        assert_holds(path, before)


def test_a_second_save_waits_for_the_first_and_reuses_its_memory(tmp_path):
    pieces = [whole("model.a", torch.zeros(1 << 22))]
    with Saver(tmp_path, asynchronous=True) as saver:
        first = saver.save(1, pieces, {})
        second = saver.save(2, pieces, {})
        assert first.done()
        second.wait()
        assert saver._snapshots._arena.num_bytes == 1 << 24


def test_a_state_that_is_changed_after_the_call_is_saved_as_it_was(tmp_path):
    state = {"position": 1}
    with Saver(tmp_path, asynchronous=True) as saver:
        path = saver.save(1, [], state).path
        state["position"] = 2
    assert open_commit(path).state == {"position": 1}


@pytest.mark.parametrize("state", [{"a": float("nan")}, {"a": torch.zeros(1)}, {"a": {1, 2}}])
def test_a_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path, state):
    with Saver(tmp_path) as saver, pytest.raises(DrumlineError, match="state cannot be stored as JSON"):
        saver.save(1, [], state)
    assert list(tmp_path.iterdir()) == []


def test_saving_a_step_again_replaces_its_commit(tmp_path):
    with Saver(tmp_path) as saver:
        saver.save(1, [whole("model.a", torch.zeros(4))], {})
        saver.save(1, [whole("model.a", torch.ones(4))], {})
    assert_holds(tmp_path / "step-00000001", {"model.a": torch.ones(4)})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_does_not_match_is_listed_at_once_and_nothing_is_changed(tmp_path):
    with Saver(tmp_path) as saver:
        path = saver.save(1, [whole(name, torch.ones(4, 2)) for name in ("a", "b", "c", "d")], {}).wait()
    wanted = [
        whole("a", torch.zeros(4, 2)),
        whole("b", torch.zeros(4, 3)),
        whole("c", torch.zeros(4, 2, dtype=torch.bfloat16)),
        whole("e", torch.zeros(1)),
    ]
    with pytest.raises(CommitError) as caught:
        open_commit(path).read_into(wanted)
    for part in (
        "missing: e [1]",
        "unexpected: d [4, 2]",
        "shape: b is stored as [4, 2], wanted [4, 3]",
        "dtype: c is stored as F32, wanted BF16",
    ):
        assert part in str(caught.value)
    assert not any(piece.tensor.any() for piece in wanted)


def test_a_prefix_reads_the_weights_only(tmp_path):
    with Saver(tmp_path) as saver:
        path = saver.save(1, [whole("model.a", torch.ones(2)), whole("optimizer.a", torch.ones(2))], {}).wait()
    wanted = [whole("model.a", torch.zeros(2))]
    open_commit(path).read_into(wanted, prefix="model.")
    assert wanted[0].tensor.tolist() == [1, 1]


def test_parts_that_do_not_lie_within_the_tensor_are_refused():
    with pytest.raises(DrumlineError, match="does not lie within"):
        Piece("a", (4,), (3,), torch.zeros(2))


def test_a_piece_given_twice_is_refused(tmp_path):
    with Saver(tmp_path) as saver, pytest.raises(DrumlineError, match="given twice"):
        saver.save(1, [whole("a", torch.zeros(2)), whole("a", torch.zeros(2))], {})


def test_a_tensor_with_a_hole_is_not_committed(tmp_path):
    with Saver(tmp_path) as saver, pytest.raises(SaveError, match="2 of 4 elements are in no piece"):
        saver.save(1, [Piece("a", (4,), (0,), torch.zeros(2))], {}).wait()
    assert newest_commit(tmp_path) is None


@ranks(2)
def test_replicas_are_written_once_and_both_ranks_write(tmp_path):
    tensors = {f"model.{i}": torch.full((100,), float(i)) for i in range(10)}
    with Saver(tmp_path, rank=dist.get_rank(), world_size=2, asynchronous=True) as saver:
        path = saver.save(1, [whole(name, tensor, (0, 1)) for name, tensor in tensors.items()], {}).wait()
    assert_holds(path, tensors)
    by_rank = [load_file(path / f"shard-0000{rank}-of-00002.safetensors").keys() for rank in (0, 1)]
    assert len(by_rank[0]) == len(by_rank[1]) == 5
    assert not by_rank[0] & by_rank[1]


@ranks(2)
def test_an_undeclared_replica_is_refused_with_the_remedy(tmp_path):
    remedy = r"overlap \(ranks \[0, 1\].*Piece.replicas must name them"
    with Saver(tmp_path, rank=dist.get_rank(), world_size=2) as saver, pytest.raises(SaveError, match=remedy):
        saver.save(1, [whole("model.a", torch.ones(3))], {}).wait()
    dist.barrier()
    assert newest_commit(tmp_path) is None


@ranks(4)
def test_a_commit_of_any_layout_is_read_under_any_other(tmp_path):
    rank = dist.get_rank()
    tensors = random_tensors()
    columns = {name: tensor for name, tensor in tensors.items() if tensor.ndim == 2 and tensor.numel()}

    def fsdp(source):
        return [row_shard(name, tensor, rank, 4, (0, 1, 2, 3) * (tensor.ndim == 0)) for name, tensor in source.items()]

    def hsdp(source):
        replicas = (rank % 2, rank % 2 + 2)
        return [
            row_shard(name, tensor, rank % 2, 2, (0, 1, 2, 3) if tensor.ndim == 0 else replicas)
            for name, tensor in source.items()
        ]

    def ddp(source):
        return [whole(name, tensor, (0, 1, 2, 3)) for name, tensor in source.items()]

    def column_parallel(source):
        pieces = []
        for name, tensor in source.items():
            if name in columns:
                width = -(-tensor.shape[1] // 4)
                part = tensor[:, rank * width : (rank + 1) * width]
                pieces.append(Piece(name, tuple(tensor.shape), (0, min(rank * width, tensor.shape[1])), part))
            else:
                pieces.append(whole(name, tensor, (0, 1, 2, 3)))
        return pieces

    layouts = [fsdp, hsdp, ddp, column_parallel]
    with Saver(tmp_path, rank=rank, world_size=4, keep=99, asynchronous=True) as saver:
        for step, layout in enumerate(layouts):
            saver.save(step, layout(tensors), {})
    zeros = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    for step in range(len(layouts)):
        commit = open_commit(tmp_path / f"step-0000000{step}")
        for layout in layouts:
            wanted = layout({name: tensor.clone() for name, tensor in zeros.items()})
            commit.read_into(wanted)
            for found, expected in zip(wanted, layout(tensors), strict=True):
                assert torch.equal(found.tensor, expected.tensor), (step, layout, found.name)
        assert_holds(commit.path, tensors)


@ranks(3)
def test_a_rank_that_fails_is_named_on_every_rank_and_nobody_waits(tmp_path):
    rank = dist.get_rank()
    saver = Saver(tmp_path, rank=rank, world_size=3, timeout_s=30)
    saver.save(1, [row_shard("model.a", torch.arange(6.0), rank, 3)], {}).wait()
    if rank == 1:  # a folder in the way of its shard
        (tmp_path / f".tmp-step-00000002-{saver._session}-0002" / "shard-00001-of-00003.safetensors").mkdir(
            parents=True
        )
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(SaveError, match=r"step 2 was not committed: .*rank 1 wrote.*Earlier commits are untouched"):
        saver.save(2, [row_shard("model.a", torch.arange(6.0), rank, 3)], {}).wait()
    assert time.monotonic() - began < 5
    dist.barrier()
    assert newest_commit(tmp_path) == tmp_path / "step-00000001"
    saver.save(3, [row_shard("model.a", torch.arange(6.0), rank, 3)], {}).wait()
    saver.close()
    dist.barrier()
    assert newest_commit(tmp_path) == tmp_path / "step-00000003"
    assert [path.name for path in tmp_path.glob(".*")] == []


@ranks(2)
def test_a_rank_that_never_comes_is_named_after_the_timeout(tmp_path):
    saver = Saver(tmp_path, rank=dist.get_rank(), world_size=2, timeout_s=0.5)
    if dist.get_rank() == 0:
        with pytest.raises(SaveError, match="rank 1 did not finish writing in time"):
            saver.save(1, [whole("a", torch.ones(1))], {}).wait()
    dist.barrier()


@ranks(2)
def test_a_folder_that_cannot_be_made_is_reported_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SaveError, match="commits cannot be kept"):
        Saver(tmp_path / "file" / "checkpoints", rank=dist.get_rank(), world_size=2)


def test_a_failure_that_nobody_saw_is_raised_by_the_next_save_once(tmp_path):
    saver = Saver(tmp_path, asynchronous=True)
    handle = saver.save(1, [Piece("a", (4,), (0,), torch.zeros(2))], {})
    with pytest.raises(SaveError, match="step 1 was not committed"):
        saver.save(2, [whole("a", torch.zeros(4))], {})
    assert isinstance(handle.error, SaveError)
    saver.save(3, [whole("a", torch.zeros(4))], {})
    saver.close()
    assert newest_commit(tmp_path) == tmp_path / "step-00000003"


def test_saving_leaks_no_file_descriptors(tmp_path):
    tensors = random_tensors()
    pieces = [whole(name, tensor) for name, tensor in tensors.items()]
    counts = []
    with Saver(tmp_path, asynchronous=True) as saver:
        for step in range(1, 6):
            open_commit(saver.save(step, pieces, {}).wait()).read_into(empty_pieces(tensors))
            counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] == counts[1]


def test_what_was_prepared_for_is_saved_as_without(tmp_path):
    tensors = random_tensors()
    pieces = [whole(name, tensor) for name, tensor in tensors.items()]
    with Saver(tmp_path) as saver:
        saver.prepare(pieces)
        saver.prepare([*pieces, whole("model.large", torch.ones(1 << 20))])
        path = saver.save(1, pieces, {}).wait()
        saver.prepare(pieces)
    assert_holds(path, tensors)
