"""Whatever is done to a commit's files is found, and named."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from drumline.checkpoint import (
    CommitError,
    DamagedCommitError,
    NotACommitError,
    Piece,
    Saver,
    newest_commit,
    open_commit,
    whole,
)
from drumline.checkpoint.folder import Folder
from drumline.checkpoint.verifying import verify
from drumline.storage import Filesystem, read_header

SHARD = "shard-00001-of-00002.safetensors"
NAMES = ["model.a", "model.b", "optimizer.a.exp_avg"]


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A commit of two ranks, whose tensors are several checksums long."""
    directory = tmp_path_factory.mktemp("commits")
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(40, 10, generator=generator) for name in NAMES}
    savers = [
        Saver(directory, rank=rank, world_size=2, session="s", recipe={"name": "x"}, asynchronous=True, chunk_bytes=400)
        for rank in range(2)
    ]
    handles = [
        saver.save(3, [Piece(n, (40, 10), (20 * rank, 0), t[20 * rank :][:20]) for n, t in tensors.items()], {"p": 1})
        for rank, saver in enumerate(savers)
    ]
    return handles[0].wait()


@pytest.fixture
def commit(original, tmp_path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(original, tmp_path / original.name))


def flip(path: Path, position: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def test_a_whole_commit_verifies(original):
    verdict = verify(original)
    assert not verdict.damages
    assert (verdict.num_tensors, verdict.num_files) == (3, 8)


@pytest.mark.parametrize(
    "file", ["COMMITTED", "manifest.json", "index.json", "recipe.json", "state.json", "environment.json"]
)
def test_any_flipped_bit_of_a_json_file_is_found_on_opening_and_its_file_named(commit, file):
    content = (commit / file).read_bytes()
    for position in range(0, len(content), max(1, len(content) // 150)):
        flip(commit / file, position, position % 8)
        damages = verify(commit).damages
        # The marker vouches for the manifest, so a change of one may be told as a mismatch of both.
        assert damages, position
        assert any(file in str(damage) for damage in damages), (position, damages)
        with pytest.raises(DamagedCommitError, match=file.replace(".", r"\.")):
            open_commit(commit)
        (commit / file).write_bytes(content)


@pytest.mark.parametrize("rank", [0, 1])
def test_any_flipped_bit_of_a_shard_is_found_and_file_tensor_and_rank_named(commit, rank):
    shard = commit / f"shard-0000{rank}-of-00002.safetensors"
    placed, data_start = read_header(shard)
    content = shard.read_bytes()
    for position in range(data_start, len(content), 53):
        flip(shard, position, position % 8)
        (damage,) = verify(commit).damages
        hit = next(stored for stored in placed if stored.start <= position - data_start < stored.end)
        assert (damage.file, damage.tensor, damage.rank) == (shard.name, hit.key, rank)
        with pytest.raises(DamagedCommitError, match=rf"{shard.name}.*{hit.key}.*rank {rank}"):
            open_commit(commit).read_into([whole(name, torch.zeros(40, 10)) for name in NAMES])
        shard.write_bytes(content)


def test_a_flipped_bit_in_the_header_of_a_shard_is_found(commit):
    flip(commit / SHARD, 30)
    (damage,) = verify(commit).damages
    assert damage.file == SHARD
    assert "header" in damage.reason


def test_damage_is_reported_only_where_bytes_are_needed(commit):
    shard = commit / SHARD
    flip(shard, len(shard.read_bytes()) - 1)
    first_half = [Piece(name, (40, 10), (0, 0), torch.zeros(20, 10)) for name in NAMES]
    open_commit(commit).read_into(first_half)


@pytest.mark.parametrize("num_bytes", [0, 5, 4096, 5000])
def test_a_truncated_shard_is_found_on_opening_with_the_first_tensor_that_is_lost(commit, num_bytes):
    data = (commit / SHARD).read_bytes()
    (commit / SHARD).write_bytes(data[:num_bytes])
    with pytest.raises(DamagedCommitError, match=rf"{SHARD}: it is cut off: .* instead of .*tensor .*rank 1"):
        open_commit(commit)
    assert [damage.file for damage in verify(commit).damages] == [SHARD]


def test_a_shard_that_grew_is_found(commit):
    with (commit / SHARD).open("ab") as shard:
        shard.write(b"x")
    with pytest.raises(DamagedCommitError, match="too long"):
        open_commit(commit)


@pytest.mark.parametrize(
    "file", [SHARD, "index.json", "recipe.json", "state.json", "environment.json", "manifest.json"]
)
def test_a_missing_file_is_found_on_opening_and_named(commit, file):
    (commit / file).unlink()
    with pytest.raises(DamagedCommitError, match=rf"{file}: it is missing"):
        open_commit(commit)
    assert verify(commit).damages[0].file == file


def test_all_damages_are_reported_at_once(commit):
    (commit / SHARD).unlink()
    flip(commit / "state.json", 3)
    flip(commit / "shard-00000-of-00002.safetensors", 5000)
    assert {damage.file for damage in verify(commit).damages} == {
        SHARD,
        "state.json",
        "shard-00000-of-00002.safetensors",
    }


def test_shards_of_another_step_are_found(original, commit):
    with Saver(commit.parent / "other", world_size=1) as saver:
        other = saver.save(3, [whole(name, torch.ones(40, 10)) for name in NAMES], {}).wait()
    shutil.copy(other / "shard-00000-of-00001.safetensors", commit / SHARD)
    with pytest.raises(DamagedCommitError, match=SHARD):
        open_commit(commit)


def test_without_its_marker_a_folder_is_no_commit(commit):
    (commit / "COMMITTED").unlink()
    with pytest.raises(NotACommitError, match="no file COMMITTED"):
        open_commit(commit)
    with pytest.raises(NotACommitError):
        verify(commit)


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "pickle"])
def test_what_is_foreign_is_refused_and_nothing_is_unpickled(tmp_path, kind):
    path = tmp_path / "step-00000001"

    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    if kind == "file":
        torch.save({}, path)
    elif kind != "missing":
        path.mkdir()
    if kind == "pickle":
        for name in (".metadata", "COMMITTED", "manifest.json"):
            (path / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CommitError, match="step-00000001"):
        open_commit(path)
    assert not (tmp_path / "executed").exists()


def test_a_commit_of_a_newer_format_says_so(commit):
    marker = json.loads((commit / "COMMITTED").read_text()) | {"version": 2}
    (commit / "COMMITTED").write_text(json.dumps(marker))
    with pytest.raises(CommitError, match="format version 2; this drumline reads up to 1"):
        open_commit(commit)


def test_a_manifest_cannot_name_files_outside_of_the_commit(commit):
    from drumline.checkpoint.index import FileEntry, Manifest, Marker, from_bytes, to_bytes
    from drumline.storage import digest_of

    manifest = from_bytes(Manifest, (commit / "manifest.json").read_bytes(), commit / "manifest.json")
    files = manifest.files | {"../outside": FileEntry(num_bytes=1, xxh3_128="0" * 32)}
    data = to_bytes(manifest.model_copy(update={"files": files}))
    (commit / "manifest.json").write_bytes(data)
    marker = from_bytes(Marker, (commit / "COMMITTED").read_bytes(), commit / "COMMITTED")
    entry = FileEntry(num_bytes=len(data), xxh3_128=digest_of([data]))
    (commit / "COMMITTED").write_bytes(to_bytes(marker.model_copy(update={"manifest": entry})))
    with pytest.raises(DamagedCommitError, match="no plain name"):
        open_commit(commit)


def test_the_newest_whole_commit_is_found_and_what_is_skipped_is_explained(original, tmp_path):
    shutil.copytree(original, tmp_path / "step-00000003")
    shutil.copytree(original, tmp_path / "step-00000004")  # renamed by somebody
    (tmp_path / "step-00000005").mkdir()  # foreign
    (tmp_path / "step-00000006").write_text("")
    (tmp_path / "step-x").mkdir()
    (tmp_path / "notes.txt").write_text("")
    warnings = []
    assert newest_commit(tmp_path, warnings.append) == tmp_path / "step-00000003"
    assert len(warnings) == 3
    assert "renamed" in warnings[2]


def test_a_folder_that_is_not_there_has_no_newest_commit(tmp_path):
    assert newest_commit(tmp_path / "nowhere") is None


def save_steps(directory: Path, steps: list[int], **options) -> None:
    with Saver(directory, **options) as saver:
        for step in steps:
            saver.save(step, [whole("model.a", torch.full((3,), float(step)))], {}).wait()


def steps_in(directory: Path) -> list[int]:
    return [found.step for found in Folder(directory).found() if found.commit]


def test_the_newest_k_commits_are_kept(tmp_path):
    save_steps(tmp_path, [1, 2, 3, 4, 5], keep=2)
    assert steps_in(tmp_path) == [4, 5]
    assert len(list(tmp_path.iterdir())) == 2


def test_damaged_commits_do_not_count_among_those_that_are_kept(tmp_path):
    save_steps(tmp_path, [1, 2, 3], keep=9)
    (tmp_path / "step-00000003" / "shard-00000-of-00001.safetensors").unlink()
    save_steps(tmp_path, [4], keep=2)
    assert steps_in(tmp_path) == [2, 4]


def test_pruning_touches_nothing_foreign_and_no_later_step(tmp_path):
    save_steps(tmp_path, [1, 50], keep=9)
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "precious").write_text("mine")
    save_steps(tmp_path, [10], keep=1)
    assert steps_in(tmp_path) == [10, 50]
    assert (tmp_path / "step-00000002" / "precious").exists()


def test_a_foreign_folder_in_the_place_of_a_commit_is_put_aside_not_deleted(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "precious").write_text("mine")
    save_steps(tmp_path, [1])
    assert steps_in(tmp_path) == [1]
    assert [path.read_text() for path in tmp_path.glob("foreign-*/precious")] == ["mine"]


def test_a_commit_that_cannot_be_pruned_does_not_fail_the_save(tmp_path, caplog):
    class Stubborn(Filesystem):
        def remove_tree(self, path):
            raise OSError(1, "no")

    save_steps(tmp_path, [1, 2], keep=1, filesystem=Stubborn())
    assert steps_in(tmp_path) == [2]
    assert "could not be pruned" in caplog.text
