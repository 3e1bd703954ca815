"""A prepared folder holds what the text says, and appears whole or not at all, whoever is killed."""

import errno
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tests.data.texts import ListSource

from drumline.data import Corpus, stdlib, verify
from drumline.data.folder import building, locked
from drumline.data.manifest import read_manifest
from drumline.data.prepare import prepare
from drumline.data.text import Counts, Piece
from drumline.data.tokenizer import train_bpe
from drumline.data.writer import ShardWriter, dtype_for
from drumline.recipe.errors import CheckFailed, DrumlineError

# Python 3.12 and later warn of a fork beside threads, such as the tokenizer library's; the children here start none.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

FORK = multiprocessing.get_context("fork")


class BreakingSource(ListSource):
    """Raises, or does something else, after some documents."""

    def __init__(self, action):
        super().__init__(["text " * 100_000] * 3)
        self._action = action

    def pieces(self):
        yield from super().pieces()
        self._action()


def raising(error):
    def action():
        raise error

    return action


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_documents_come_back_as_they_went_in(make_corpus):
    texts = ["one", "two \u00e9\u4e2d\U0001f600\r\n", "x" * 1000, "\x00 is a character"]
    corpus = make_corpus(texts)
    decode = corpus.tokenizer().decode
    assert [decode(corpus.document(number)) for number in range(4)] == texts
    assert corpus.manifest.num_tokens == sum(len(text.encode()) + 1 for text in texts)
    assert corpus.lengths.tolist() == [len(text.encode()) + 1 for text in texts]


def test_bpe_documents_come_back_though_long_ones_are_tokenized_in_pieces(make_corpus):
    texts = ["the cat sat on the mat\n" * 30_000, "no line end " * 50_000]
    corpus = make_corpus(texts, tokenizer="bpe:300")
    decode = corpus.tokenizer().decode
    assert [decode(corpus.document(number)) for number in range(2)] == texts


def test_shards_are_divided_at_documents_and_read_as_one(make_folder):
    texts = [f"document {number} " * (number % 7 + 1) for number in range(50)]
    whole, divided = (
        Corpus(make_folder(texts, name=name, shard_tokens=size)) for name, size in (("a", 10**6), ("b", 200))
    )
    assert len(whole.tokens) == 1
    assert len(divided.tokens) > 10
    assert divided.lengths.tolist() == whole.lengths.tolist()
    assert divided.document(49).tolist() == whole.document(49).tolist()
    with pytest.raises(DrumlineError, match=r"no document 50 in .*numbered 0 to 49"):
        divided.document(50)


def test_the_same_text_gives_the_same_bytes_whatever_the_place(make_folder):
    texts = ["the cat sat on the mat " * 50, "another text " * 50]
    files = [
        {path.name: path.read_bytes() for path in make_folder(texts, name=name, tokenizer="bpe:300").iterdir()}
        for name in ("a", "b")
    ]
    assert files[0] == files[1]


def test_empty_documents_are_left_out_and_counted(make_corpus):
    corpus = make_corpus(["a", "", " \n", "b"])
    assert (corpus.num_documents, corpus.manifest.source.num_empty) == (2, 2)


def test_a_source_without_text_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(DrumlineError, match=r"no text in a list \(empty documents: 2\)"):
        prepare(ListSource(["", "\n"]), tmp_path / "folder", tokenizer="bytes")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_tokens_take_two_bytes_where_they_fit(vocab_size, dtype):
    assert dtype_for(vocab_size) == dtype


def test_large_token_numbers_are_stored_whole(tmp_path):
    writer = ShardWriter(tmp_path, dtype="uint32", eos=0)
    writer.add(np.array([70_000, 128_255], dtype=np.uint32))
    writer.end_document()
    (shard,) = writer.close()
    assert np.fromfile(tmp_path / shard.tokens.name, "<u4").tolist() == [70_000, 128_255, 0]


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            DrumlineError,
            "no space left for .*folder: nothing was kept",
        ),
        (OSError(errno.EIO, "Input/output error", "/a/file"), DrumlineError, "/a/file: Input/output error"),
        (DrumlineError("line 7 is wrong"), DrumlineError, "line 7 is wrong"),
    ],
)
def test_a_preparation_that_fails_leaves_nothing(tmp_path, error, raised, message):
    with pytest.raises(raised, match=message):
        prepare(BreakingSource(raising(error)), tmp_path / "folder", tokenizer="bytes")
    assert left_in(tmp_path) == []


def test_a_preparation_that_fails_leaves_the_folder_that_it_would_have_replaced(make_folder):
    folder = make_folder(["old"])
    with pytest.raises(DrumlineError):
        prepare(BreakingSource(raising(DrumlineError("no"))), folder, tokenizer="bytes", overwrite=True)
    assert bytes(Corpus(folder).document(0).tolist()) == b"old"
    assert left_in(folder.parent) == ["folder"]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path):
    import resource

    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            prepare(ListSource(["text " * 100_000]), tmp_path / "folder", tokenizer="bytes")
        except DrumlineError as error:
            os._exit(7 if "File too large" in str(error) else 8)

    child = FORK.Process(target=fill)
    child.start()
    child.join(30)
    assert child.exitcode == 7
    assert left_in(tmp_path) == []


def test_after_a_kill_in_the_middle_the_next_preparation_succeeds_and_cleans_up(tmp_path):
    source = BreakingSource(lambda: os.kill(os.getpid(), signal.SIGKILL))
    child = FORK.Process(target=lambda: prepare(source, tmp_path / "folder", tokenizer="bytes"))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert left_in(tmp_path) == [".folder.lock", ".folder.partial"]
    prepare(ListSource(["text"]), tmp_path / "folder", tokenizer="bytes")
    assert left_in(tmp_path) == ["folder"]
    verify(tmp_path / "folder")


def test_an_overwrite_that_was_killed_between_its_renames_keeps_the_old_folder(make_folder):
    folder = make_folder(["old"])
    folder.rename(folder.with_name(".folder.replaced"))
    with pytest.raises(RuntimeError), building(folder):
        raise RuntimeError
    assert bytes(Corpus(folder).document(0).tolist()) == b"old"


def test_an_overwrite_replaces_a_prepared_folder(make_folder):
    folder = make_folder(["old"])
    prepare(ListSource(["new"]), folder, tokenizer="bytes", overwrite=True)
    assert bytes(Corpus(folder).document(0).tolist()) == b"new"
    assert left_in(folder.parent) == ["folder"]


def test_nothing_else_is_ever_replaced(make_folder, tmp_path):
    folder = make_folder(["old"])
    with pytest.raises(DrumlineError, match="a prepared folder already: choose another --out, or replace it"):
        prepare(ListSource(["new"]), folder, tokenizer="bytes")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("text")
    for name, message in (("other", "holds something else"), ("file", "not a folder")):
        with pytest.raises(DrumlineError, match=message):
            prepare(ListSource(["new"]), tmp_path / name, tokenizer="bytes", overwrite=True)
    assert (tmp_path / "other" / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "folder").mkdir()
    prepare(ListSource(["text"]), tmp_path / "folder", tokenizer="bytes")
    verify(tmp_path / "folder")


def test_a_wrong_tokenizer_is_told_before_the_source_is_read(tmp_path):
    with pytest.raises(DrumlineError, match="no tokenizer 'nowhere'"):
        prepare(BreakingSource(raising(AssertionError())), tmp_path / "folder", tokenizer="nowhere")


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DrumlineError, match=r"cannot write in .*file/sub: Not a directory"):
        prepare(ListSource(["text"]), tmp_path / "file" / "sub" / "folder", tokenizer="bytes")


def test_text_can_be_tokenized_by_a_stored_tokenizer(make_folder, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe(280, ["hello world " * 50]).to_json())
    folders = [make_folder(["hello world"], name=name, tokenizer=str(path)) for name in ("a", "b")]
    assert Corpus(folders[0]).tokenizer().decode(Corpus(folders[0]).document(0)) == "hello world"
    assert read_manifest(folders[0]).tokenizer.file == read_manifest(folders[1]).tokenizer.file


def test_progress_ends_at_the_total(tmp_path):
    seen = []
    source = ListSource(["text " * 1000] * 500)
    prepare(source, tmp_path / "folder", tokenizer="bytes", report=seen.append)
    assert seen[-1].done_bytes == seen[-1].total_bytes == source.num_bytes
    assert (seen[-1].num_documents, seen[-1].num_tokens) == (500, 500 * 5001)
    assert len(seen) > 1


# Damage


def damage(folder: Path, name: str, change) -> None:
    path = folder / name
    path.write_bytes(change(bytearray(path.read_bytes())))


def flip(at: int):
    def change(data: bytearray) -> bytearray:
        data[at] ^= 1
        return data

    return change


@pytest.fixture
def folder(make_folder):
    return make_folder(["the cat sat on the mat " * 10, "and another one " * 10], tokenizer="bpe:300")


NAMES = ["tokens-00000.bin", "documents-00000.bin", "tokenizer.json", "manifest.json"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at", [0, 20, -1])
def test_a_flipped_bit_anywhere_is_found_and_its_file_named(folder, name, at):
    damage(folder, name, flip(at))
    with pytest.raises(DrumlineError, match=name) as caught:
        verify(folder)
    assert isinstance(caught.value, CheckFailed) or name == "manifest.json"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [lambda data: data[:-2], lambda data: data + b"\0", lambda data: b""])
def test_a_file_of_another_size_is_refused_when_the_folder_is_opened(folder, name, change):
    damage(folder, name, change)
    with pytest.raises(DrumlineError, match=name):
        Corpus(folder)


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_missing_file_is_refused_and_named_by_verify(folder, name):
    (folder / name).unlink()
    with pytest.raises(DrumlineError, match=f"{name} is missing"):
        Corpus(folder)
    with pytest.raises(CheckFailed, match=f"{name} is missing"):
        verify(folder)


def test_all_damaged_files_are_named_at_once(folder):
    for name in NAMES[:3]:
        damage(folder, name, flip(0))
    with pytest.raises(CheckFailed) as caught:
        verify(folder)
    assert len(caught.value.faults) == 3


def test_a_changed_index_is_refused_when_the_folder_is_opened(folder):
    damage(folder, "documents-00000.bin", flip(8))
    with pytest.raises(DrumlineError, match=r"documents-00000.bin is damaged: its digest"):
        Corpus(folder)


def test_verify_of_a_sound_folder_reports_every_byte(folder):
    seen = []
    verify(folder, lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json")
    assert seen[-1] == (total, total)


def test_folders_that_are_none_are_told_apart(tmp_path):
    foreign, newer = tmp_path / "foreign", tmp_path / "newer"
    for path in (foreign, newer):
        path.mkdir()
    with pytest.raises(DrumlineError, match=r"no data folder .*nowhere: make it by `drumline data prepare"):
        Corpus(tmp_path / "nowhere")
    with pytest.raises(DrumlineError, match=r"foreign is not a prepared data folder \(it has no manifest.json\)"):
        Corpus(foreign)
    (foreign / "manifest.json").write_text('{"name": "web extension"}')
    with pytest.raises(DrumlineError, match="is this another tool's folder"):
        Corpus(foreign)
    (newer / "manifest.json").write_text('{"format": "drumline-data", "version": 9}')
    with pytest.raises(DrumlineError, match="format version 9, this drumline reads 1"):
        Corpus(newer)
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(DrumlineError, match=r"text.txt is a file, not a prepared data folder"):
        Corpus(tmp_path / "text.txt")


def test_a_manifest_that_points_outside_its_folder_is_refused(folder):
    from drumline.data.manifest import _digest_of_body

    body = json.loads((folder / "manifest.json").read_text())
    del body["digest"]
    body["shards"][0]["tokens"]["name"] = "../outside.bin"
    body["digest"] = _digest_of_body(body)
    (folder / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(DrumlineError, match=r"'../outside.bin' is not the name of a file beside the manifest"):
        Corpus(folder)


# Several processes


def test_a_lock_keeps_a_second_process_out_until_it_is_given_up(tmp_path):
    began, out = FORK.Event(), tmp_path / "folder"

    def hold():
        with locked(out):
            began.set()
            time.sleep(0.3)
            (tmp_path / "done").touch()

    child = FORK.Process(target=hold)
    child.start()
    assert began.wait(10)
    waited = []
    with locked(out, lambda: waited.append(True)):
        assert (tmp_path / "done").exists()
    child.join(10)
    assert waited == [True]
    assert left_in(tmp_path) == ["done"]


def test_a_lock_dies_with_its_holder(tmp_path):
    child = FORK.Process(target=lambda: locked(tmp_path / "folder").__enter__() or os.kill(os.getpid(), signal.SIGKILL))
    child.start()
    child.join(10)
    with locked(tmp_path / "folder", lambda: pytest.fail("nobody holds it")):
        pass


def test_many_processes_that_want_the_built_in_source_prepare_it_once(tmp_path, monkeypatch):
    root = tmp_path / "library"
    root.mkdir()
    for number in range(20):
        (root / f"module{number}.py").write_text(f"def f{number}():\n    return {number}\n" * 200)
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(root))

    def say(message):
        with (tmp_path / "said").open("a") as file:
            file.write(message + "\n")

    def open_it():
        corpus = stdlib.cached(str(tmp_path / "cache"), "bpe:300", say)
        os._exit(corpus.num_documents)

    children = [FORK.Process(target=open_it) for _ in range(6)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [20] * 6
    assert sum(line.startswith("prepared ") for line in (tmp_path / "said").read_text().splitlines()) == 1
    assert len(left_in(tmp_path / "cache")) == 1


def test_the_cache_is_keyed_by_text_and_tokenizer_and_mends_itself(tmp_path, monkeypatch):
    root, cache = tmp_path / "library", tmp_path / "cache"
    root.mkdir()
    (root / "a.py").write_text("text = 1\n" * 500)
    (root / "bad.py").write_bytes(b"\xff\xfe")
    (root / "site-packages").mkdir()
    (root / "site-packages" / "b.py").write_text("not the library's")
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(root))
    said = []
    first = stdlib.cached(str(cache), "bytes", said.append)
    assert (first.num_documents, first.manifest.source.num_skipped) == (1, 1)
    assert stdlib.cached(str(cache), "bytes", said.append).folder == first.folder
    assert len(said) == 2
    assert stdlib.cached(str(cache), "bpe:300", said.append).folder != first.folder
    (first.folder / "tokens-00000.bin").write_bytes(b"")
    mended = stdlib.cached(str(cache), "bytes", said.append)
    assert mended.folder == first.folder
    verify(mended.folder)
    (root / "a.py").write_text("text = 2\n" * 500)
    assert stdlib.cached(str(cache), "bytes", said.append).folder != first.folder


def test_a_cache_that_cannot_be_written_names_the_key_that_moves_it(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("text = 1\n" * 500)
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DrumlineError, match=r"cannot write in .*\n  data.cache_dir=FOLDER keeps"):
        stdlib.cached(str(tmp_path / "a.py" / "cache"), "bytes", print)


def test_the_interpreters_own_library_is_tens_of_megabytes_of_text():
    source = stdlib.StdlibSource()
    assert source.num_bytes > 10e6
    assert isinstance(next(iter(source.pieces())), Piece)
    assert source.counts == Counts(num_skipped=source.counts.num_skipped)
