"""`drumline data` as a user types it: files in, a folder out, and exit codes that scripts can rely on."""

import json

import pytest

from drumline.cli import app
from drumline.data import open_dataset
from drumline.recipe import DrumlineError, load, problems


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, with a folder `text` of three documents."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number}\n" * 50)
    return tmp_path


def run(capsys, *args: str) -> tuple[int, str, str]:
    code = app.main(["data", *args])
    said = capsys.readouterr()
    return code, said.out, said.err


def as_json(capsys, *args: str) -> dict:
    code, out, _ = run(capsys, *args, "--json")
    assert code == 0
    return json.loads(out)


def test_prepare_then_inspect_then_verify(here, capsys):
    code, out, _ = run(capsys, "prepare", "text", "--tokenizer", "bytes")
    assert code == 0
    assert "data/text: 1,653 tokens in 3 documents" in out
    assert "drumline train RECIPE data.sources=data/text" in out
    code, out, _ = run(capsys, "inspect", "data/text")
    assert code == 0
    assert "1,653 (1.00 bytes each)" in out
    assert "  document 0" in out
    code, out, _ = run(capsys, "verify", "data/text")
    assert (code, "every file is as it was written" in out) == (0, True)


@pytest.mark.parametrize(
    ("options", "num_documents", "ends"),
    [
        ((), 1, "run.validation_batches=0\n  (a single document leaves none for validation"),
        (("--documents", "line"), 600, "data.sources=data/one\n"),
        (
            ("--documents", "line", "--validation-fraction", "0"),
            600,
            "run.validation_batches=0\n  (no document is kept",
        ),
    ],
)
def test_what_prepare_says_to_train_with_opens(here, capsys, options, num_documents, ends):
    (here / "one.txt").write_text("Left. Right. Paradiddle.\n" * 600)
    code, out, _ = run(capsys, "prepare", "one.txt", "--tokenizer", "bytes", *options)
    assert (code, f"in {num_documents} document" in out, ends in out) == (0, True, True)
    words = next(line for line in out.splitlines() if "drumline train" in line).split()
    recipe = load("llama3-debug", words[3:])
    assert not problems(recipe)
    open_dataset(recipe.data, seed=0, split="train")
    if recipe.run.validation_batches:
        open_dataset(recipe.data, seed=0, split="validation")
    else:
        with pytest.raises(DrumlineError, match="no document for validation"):
            open_dataset(recipe.data, seed=0, split="validation")


def test_json_output_is_one_document_and_nothing_else(here, capsys):
    made = as_json(capsys, "prepare", "text", "--out", "out", "--tokenizer", "bytes", "--validation-fraction", "0.25")
    assert (made["folder"], made["num_tokens"], made["num_documents"]) == ("out", 1653, 3)
    seen = as_json(capsys, "inspect", "out")
    assert seen["digest"] == made["digest"]
    assert seen["validation_fraction"] == 0.25
    assert seen["document_tokens"] == {"shortest": 551, "median": 551, "longest": 551}
    assert as_json(capsys, "inspect", "out", "--document", "2")["text"] == "document 2\n" * 50
    assert as_json(capsys, "verify", "out") == {"folder": "out", "holds": True, "faults": [], "num_bytes": 3338}


def test_inspect_prints_a_whole_document(here, capsys):
    run(capsys, "prepare", "text", "--tokenizer", "bytes")
    assert run(capsys, "inspect", "data/text", "--document", "1")[1] == "document 1\n" * 50
    code, _, err = run(capsys, "inspect", "data/text", "--document", "3")
    assert (code, "numbered 0 to 2" in err) == (2, True)


def test_verify_of_a_damaged_folder_exits_1_and_names_the_file(here, capsys):
    run(capsys, "prepare", "text", "--tokenizer", "bytes")
    path = here / "data" / "text" / "tokens-00000.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 4
    path.write_bytes(data)
    code, _, err = run(capsys, "verify", "data/text")
    assert (code, "tokens-00000.bin is damaged" in err) == (1, True)
    code, out, _ = run(capsys, "verify", "data/text", "--json")
    assert (code, json.loads(out)["holds"]) == (1, False)


def test_what_was_left_out_is_told(here, capsys):
    (here / "text" / "image.png").write_bytes(b"\x89PNG\x00")
    (here / "text" / "empty.txt").write_text("")
    out = run(capsys, "prepare", "text", "--tokenizer", "bytes")[1]
    assert "not text, left out (files or lines): 1" in out
    assert "empty, left out (documents): 1" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["prepare", "nowhere"], "no source 'nowhere'"),
        (["prepare", "text", "--tokenizer", "bpe:9"], "a number from 257 up"),
        (["prepare", "text", "--tokenizer", "nowhere.json"], "no tokenizer 'nowhere.json'"),
        (["prepare", "text", "--out", "text"], "holds something else"),
        (["prepare", "text/*.txt"], "name it with --out"),
        (["prepare", "text", "--validation-fraction", "2"], "0.99"),
        (["prepare", "text", "--documents", "chapter"], "chapter"),
        (["inspect", "text"], "text is not a prepared data folder"),
        (["verify", "nowhere"], "no data folder nowhere"),
    ],
)
def test_a_wrong_request_exits_2_with_one_message(here, capsys, args, message):
    code, out, err = run(capsys, *args)
    assert code == 2
    assert message in err
    assert out == ""
    assert not (here / "data").exists() or not list((here / "data").iterdir())


def test_a_prepared_folder_trains_by_the_override_that_prepare_prints(here, capsys):
    from drumline.data import open_dataset
    from drumline.recipe import load

    out = run(capsys, "prepare", "text", "--tokenizer", "bytes")[1]
    override = out.split()[-1]
    recipe = load("llama3-debug", [override, "data.seq_len=16"])
    assert open_dataset(recipe.data, recipe.run.seed).num_samples == 68
