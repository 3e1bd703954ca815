"""Files of every kind become the documents that were put into them, piece by piece."""

import gzip
import json
import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.data import readers, text
from drumline.data.sources import open_source
from drumline.recipe.errors import DrumlineError


def documents(source) -> list[str]:
    """Joins pieces to documents."""
    whole, parts = [], []
    for piece in source.pieces():
        parts.append(piece.text)
        if piece.ends_document:
            whole.append("".join(parts))
            parts = []
    assert not parts
    return whole


def read(*paths, **options) -> list[str]:
    return documents(open_source([str(path) for path in paths], **options))


def test_a_folder_gives_a_document_a_file_in_the_order_of_paths(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("z.txt", "b/a.md", "a.txt", ".hidden"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.txt", "b/a.md", "z.txt"]


def test_a_pattern_gives_its_files_and_a_kind_is_found_by_suffix(tmp_path):
    (tmp_path / "one.txt").write_text("text")
    (tmp_path / "two.jsonl").write_text('{"text": "json"}\n')
    (tmp_path / "three.log").write_text("left out")
    assert read(tmp_path / "*.txt", tmp_path / "t*.jsonl") == ["text", "json"]


def test_text_keeps_its_line_ends_and_loses_its_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert read(tmp_path / "a.txt", documents="file") == ["one\r\ntwo\r\n"]
    assert read(tmp_path / "a.txt", documents="line") == ["one", "two"]


def test_paragraphs_end_at_empty_lines_of_either_kind(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\n\none\ntwo\n\n\nthree\r\n\r\nfour\n \nfive")
    assert read(tmp_path / "a.txt", documents="paragraph") == ["one\ntwo", "three", "four", "five"]


@settings(max_examples=60)
@given(
    content=st.text("ab \n\r\u00e9\U0001f600", max_size=400),
    chunk=st.integers(1, 50),
    undivided=st.integers(1, 60),
    kind=st.sampled_from(["file", "page", "line", "paragraph"]),
)
def test_documents_do_not_depend_on_how_much_is_read_at_a_time(tmp_path_factory, content, chunk, undivided, kind):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(content.encode())
    expected = [part for part in read(path, documents=kind) if part.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK_BYTES", chunk if kind != "page" else readers.CHUNK_BYTES)
        patch.setattr(readers, "UNDIVIDED_CHARS", undivided if kind == "file" else readers.UNDIVIDED_CHARS)
        patch.setattr(text, "PIECE_CHARS", max(1, chunk // 2))
        assert [part for part in read(path, documents=kind) if part.strip()] == expected
    if kind == "line":
        assert expected == [line.rstrip("\r") for line in content.split("\n") if line.strip()]
    if kind == "file":
        assert expected == ([content] if content.strip() else [])


@settings(max_examples=40)
@given(content=st.text("ab \n", max_size=300), page=st.integers(2, 40), chunk=st.integers(1, 100))
def test_pages_lose_no_character_but_blank_ones(tmp_path_factory, content, page, chunk):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PAGE_CHARS", page)
        patch.setattr(readers, "CHUNK_BYTES", chunk)
        pages = read(path, documents="page")
    assert "".join("".join(pages).split()) == "".join(content.split())
    assert max(map(len, pages), default=0) <= max(1.5 * page, 0)


def test_a_large_or_lone_text_file_becomes_pages_that_end_with_a_line(tmp_path):
    line = "to be or not to be\n"
    (tmp_path / "a.txt").write_text(line * 60_000)
    pages = read(tmp_path / "a.txt")
    assert "".join(pages) == line * 60_000
    assert all(page.endswith("\n") for page in pages)
    assert 15 <= len(pages) <= 20
    (tmp_path / "b.txt").write_text(line * 10_000)
    assert len(read(tmp_path / "b.txt")) == 3
    (tmp_path / "a.txt").write_text("small")
    assert read(tmp_path) == ["small", line * 10_000]


def test_a_huge_document_is_read_in_little_memory(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("no line end here " * 2_500_000)  # 42 MB
    source = open_source([str(path)], documents="file")
    tracemalloc.start()
    num_chars = sum(len(piece.text) for piece in source.pieces())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_chars == 42_500_000
    assert peak < 30e6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text\x00more", "is not text: it has a NUL byte at byte 4"),
        (b"caf\xe9 au lait", "is not UTF-8 text: invalid continuation byte at byte 3"),
        (b"caf\xc3", "is not UTF-8 text: it ends within a character, at byte 3"),
        ("text".encode("utf-16"), "looks like UTF-16: convert it, `iconv"),
        (b"x" * (1 << 20) + b"\xff", "invalid start byte at byte 1,048,576"),
        (b"x" * ((1 << 20) - 1) + b"\xc3\x28", "invalid continuation byte at byte 1,048,575"),
    ],
)
def test_a_named_file_that_is_no_text_is_refused_with_the_byte(tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DrumlineError, match=message):
        read(tmp_path / "a.txt")


def test_a_found_file_that_is_no_text_is_left_out_and_counted(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\x00\x01")
    (tmp_path / "b.txt").write_text("text")
    source = open_source([str(tmp_path)])
    assert documents(source) == ["text"]
    assert source.counts.num_skipped == 1
    with pytest.raises(DrumlineError, match="NUL byte"):
        read(tmp_path, invalid="error")


def test_invalid_bytes_are_replaced_when_asked_for_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    source = open_source([str(tmp_path / "a.txt")], invalid="replace")
    assert documents(source) == ["caf\ufffd"]
    assert source.counts.num_replaced == 1


def test_json_lines_give_their_field_and_skip_blank_lines(tmp_path):
    lines = [json.dumps({"id": number, "body": f"text {number}\n\u00e9"}) for number in range(3)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines[0].encode()))
    assert read(tmp_path, field="body") == [f"text {number}\n\u00e9" for number in (0, 1, 2, 0)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', "line 2: no field 'text'; it has body\n  name the field with --field"),
        ('{"text": 5}', "line 2: field 'text' is a JSON number, not a string"),
        ('{"text": null}', "line 2: field 'text' is a JSON null, not a string"),
        ('{"text": "x"', "line 2: not JSON"),
        ('["x"]', "line 2: a JSON array, not an object"),
        ('"x"', 'line 2: a JSON string, not an object such as {"text": ...}'),
        ("[" * 100_000, "line 2: a JSON array, not one object a line: `jq"),
        (b'{"text": "caf\xe9"}', "line 2: not UTF-8"),
    ],
)
def test_a_line_without_text_is_refused_with_its_number_or_left_out(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(DrumlineError, match=re.escape(message)):
        read(path)
    source = open_source([str(path)], invalid="skip")
    assert documents(source) == ["first"]
    assert source.counts.num_skipped == 1


def test_an_unpaired_surrogate_becomes_the_replacement_character_and_a_pair_stays(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')
    source = open_source([str(tmp_path / "a.jsonl")])
    assert documents(source) == ["a\ufffdb", "\U0001f600"]
    assert source.counts.num_replaced == 1


def test_a_settings_file_below_a_folder_is_text_and_no_json_lines(tmp_path):
    (tmp_path / "package.json").write_text('{\n "name": "x"\n}\n')
    (tmp_path / "train.json").write_text('{"text": "a line"}\n')
    assert read(tmp_path) == ['{\n "name": "x"\n}\n', "a line"]


def test_parquet_gives_its_column_and_nulls_are_empty(tmp_path):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    texts = [f"text {number}" for number in range(2000)] + [None]
    parquet.write_table(arrow.table({"body": texts, "id": range(2001)}), tmp_path / "a.parquet", row_group_size=700)
    source = open_source([str(tmp_path / "a.parquet")], field="body")
    pieces = list(source.pieces())
    assert [piece.text for piece in pieces] == [*texts[:-1], ""]
    assert sum(piece.num_bytes for piece in pieces) == source.num_bytes


def test_parquet_without_the_column_or_of_another_type_is_refused(tmp_path):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DrumlineError, match=r"no column 'text': it has body, id; name it with --field"):
        read(tmp_path / "a.parquet")
    column = arrow.array(["x", "y", "x"]).dictionary_encode()
    parquet.write_table(arrow.table({"text": column}), tmp_path / "coded.parquet")
    assert read(tmp_path / "coded.parquet") == ["x", "y", "x"]
    with pytest.raises(DrumlineError, match="column 'id' holds int64, not strings"):
        read(tmp_path / "a.parquet", field="id")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DrumlineError, match=r"b.parquet is not a Parquet file"):
        read(tmp_path / "b.parquet")


def test_a_saved_hugging_face_dataset_gives_its_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.DatasetDict(
        {
            split: datasets.Dataset.from_dict({"text": [f"{split} {number}" for number in range(5)]})
            for split in ("train", "test")
        }
    )
    made.save_to_disk(str(tmp_path / "both"))
    made["train"].save_to_disk(str(tmp_path / "one"))
    assert read(tmp_path / "both", split="test") == [f"test {number}" for number in range(5)]
    assert read(tmp_path / "one") == [f"train {number}" for number in range(5)]
    with pytest.raises(DrumlineError, match="no split 'dev': it has train, test"):
        read(tmp_path / "both", split="dev")
    with pytest.raises(DrumlineError, match="no column 'body': it has text"):
        read(tmp_path / "one", field="body")


def test_a_named_hugging_face_dataset_is_streamed(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(name, config, **options):
        calls.append((name, config, options))
        return datasets.Dataset.from_dict({"text": ["a", "b"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("hf:someone/something", split="dev", config="en") == ["a", "b"]
    assert calls == [("someone/something", "en", {"split": "dev", "streaming": True})]


def test_a_dataset_that_cannot_be_loaded_says_why_in_a_line(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args, **options):
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DrumlineError, match=r"^cannot load hf:x \(split train\): no route to host$"):
        read("hf:x")


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["nowhere"], "no source 'nowhere': give a file, a folder, a pattern"),
        (["*.nothing"], r"no file matches '\*.nothing'"),
        (["hf:"], "hf: needs the name"),
        (["stdlib", "x"], "stdlib cannot be joined with other sources"),
        ([], "no source: give a file"),
    ],
)
def test_a_source_that_is_none_is_refused(specs, message):
    with pytest.raises(DrumlineError, match=message):
        open_source(specs)


def test_an_empty_folder_and_a_packed_file_are_refused(tmp_path):
    with pytest.raises(DrumlineError, match="no files in"):
        open_source([str(tmp_path)])
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    with pytest.raises(DrumlineError, match=r"a.jsonl.zst is packed: unpack it first, `zstd -d"):
        open_source([str(tmp_path / "a.jsonl.zst")])


def test_a_truncated_gzip_file_is_refused(tmp_path):
    packed = gzip.compress(b"some text that is long enough " * 100)
    (tmp_path / "a.txt.gz").write_bytes(packed[:-20])
    with pytest.raises(DrumlineError, match=r"cannot read .*a.txt.gz"):
        read(tmp_path / "a.txt.gz")


def test_a_sample_draws_from_many_files_and_stops_at_its_size(tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_text(f"{number} " * 1000)
    source = open_source([str(tmp_path)])
    first = [sample.split()[0] for sample in source.sample(20_000)]
    assert 6 <= len(first) <= 11
    assert first != sorted(first, key=int)
    assert first == [sample.split()[0] for sample in open_source([str(tmp_path)]).sample(20_000)]
