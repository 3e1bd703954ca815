"""`drumline checkpoint`, as a user calls it: exit codes, messages, one JSON document."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from drumline import models
from drumline.checkpoint import Piece, Saver, open_commit, whole
from drumline.cli.app import main
from drumline.recipe.sections import Data, Model, Recipe, Run
from drumline.train.resume import AnotherRunError, require_same_run

MODEL = Model(num_layers=2, dim=32, num_heads=4, num_kv_heads=2, head_dim=8, hidden_dim=48, vocab_size=64)
RECIPE = Recipe(name="tiny", model=MODEL, run=Run(seed=1))


def weights() -> dict[str, torch.Tensor]:
    model = models.build(MODEL)
    model.to_empty(device="cpu")
    models.initialize(model, 0)
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def make_run(run: Path, steps: list[int], num_shards: int = 1, change: float = 0.0) -> Path:
    tensors = weights()
    tensors |= {name.replace("model.", "optimizer.") + ".exp_avg": torch.ones_like(t) for name, t in tensors.items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + change
    with Saver(run / "checkpoints", keep=9, recipe=RECIPE.model_dump(mode="json"), environment={"torch": "x"}) as saver:
        for step in steps:
            pieces = [
                Piece(name, tuple(tensor.shape), (start, *(0 for _ in tensor.shape[1:])), part)
                for name, tensor in tensors.items()
                for start, part in zip(
                    range(0, tensor.shape[0], -(-tensor.shape[0] // num_shards)),
                    tensor.split(-(-tensor.shape[0] // num_shards)),
                    strict=True,
                )
            ]
            saver.save(step, pieces, {"step": step, "has_optimizer": True})
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "a", [10, 20, 30])
    make_run(folder / "b", [10, 20], num_shards=3)
    make_run(folder / "c", [20], change=0.125)
    return folder


@pytest.fixture
def call(capsys):
    def call(*args: object) -> tuple[int, str, str]:
        code = main(["checkpoint", *map(str, args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_list_shows_every_commit_and_what_is_wrong_with_it(call, runs, tmp_path):
    run = shutil.copytree(runs / "a", tmp_path / "a")
    (run / "checkpoints" / "step-00000020" / "shard-00000-of-00001.safetensors").unlink()
    (run / "checkpoints" / ".tmp-step-00000040-x-0001").mkdir()
    code, out, _ = call("list", run)
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 5
    assert lines[1].endswith("whole")
    assert "missing" in lines[2]
    assert "no commit: being written, or killed" in lines[4]
    code, out, _ = call("list", run, "--json")
    rows = json.loads(out)["commits"]
    assert [(row["step"], row["status"] == "whole") for row in rows] == [
        (10, True),
        (20, False),
        (30, True),
        (40, False),
    ]
    assert rows[0]["layout"] == "dp1"


def test_list_of_a_run_without_commits_says_so(call, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    code, out, _ = call("list", tmp_path)
    assert (code, "no commits" in out) == (0, True)


def test_list_of_a_commit_says_which_run_to_list(call, runs, monkeypatch):
    run = runs / "a"
    code, out, err = call("list", run / "checkpoints" / "step-00000010")
    assert (code, out) == (2, "")
    assert "step-00000010 is a commit; list takes the run that it is of" in err
    assert err.splitlines()[1] == f"  try: drumline checkpoint list {run}"
    assert call("list", run)[0] == 0
    monkeypatch.chdir(run / "checkpoints")
    assert call("list", "step-00000010")[2].splitlines()[1] == f"  try: drumline checkpoint list {run}"


@pytest.mark.parametrize("command", ["list", "inspect", "verify", "export"])
def test_a_path_without_commits_is_a_wrong_request(call, tmp_path, command):
    extra = [tmp_path / "out"] if command == "export" else []
    code, out, err = call(command, tmp_path / "nowhere", *extra)
    assert (code, out) == (2, "")
    assert "nowhere does not exist" in err


def test_inspect_shows_what_a_commit_holds(call, runs):
    code, out, _ = call("inspect", runs / "a")
    assert code == 0
    assert "step-00000030" in out
    assert "tiny" in out
    code, out, _ = call("inspect", runs / "b" / "checkpoints" / "step-00000010", "--json", "--tensors")
    document = json.loads(out)
    assert document["step"] == 10
    assert document["state"] == {"step": 10, "has_optimizer": True}
    assert {group["group"]: group["num_tensors"] for group in document["groups"]} == {"model": 21, "optimizer": 21}
    row = next(row for row in document["tensors"] if row["name"] == "model.norm.weight")
    assert row == {
        "name": "model.norm.weight",
        "dtype": "F32",
        "shape": [32],
        "num_bytes": 128,
        "num_pieces": 3,
        "ranks": [0],
    }


def test_verify_of_a_whole_run_checks_every_commit(call, runs):
    code, out, _ = call("verify", runs / "a", "--json")
    document = json.loads(out)
    assert (code, document["whole"], len(document["commits"])) == (0, True, 3)


def test_verify_names_file_tensor_and_rank_and_exits_with_1(call, runs, tmp_path):
    commit = shutil.copytree(runs / "a" / "checkpoints" / "step-00000010", tmp_path / "step-00000010")
    shard = commit / "shard-00000-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (commit / "notes.txt").write_text("mine")
    code, out, _ = call("verify", commit)
    assert code == 1
    assert "shard-00000-of-00001.safetensors" in out
    assert "tensor optimizer." in out
    assert "written by rank 0" in out
    assert "note: notes.txt is no part of the commit" in out
    code, out, _ = call("verify", commit, "--json")
    (row,) = json.loads(out)["commits"]
    assert (code, row["whole"], row["damages"][0]["rank"]) == (1, False, 0)


def test_diff_of_runs_takes_the_newest_common_step_and_ignores_layouts(call, runs):
    code, out, _ = call("diff", runs / "a", runs / "b")
    assert code == 0
    assert "equal, bit for bit: 42 tensors" in out
    assert out.count("step-00000020") == 2
    code, out, _ = call("diff", runs / "b", runs / "a", "--step", 10, "--json")
    document = json.loads(out)
    assert (code, document["equal"], document["step_a"], document["differences"]) == (0, True, 10, [])


def test_diff_names_what_differs_and_exits_with_1(call, runs):
    code, out, _ = call("diff", runs / "b", runs / "c")
    assert code == 1
    assert "1 of 42 tensors differ" in out
    assert "32 of 32" in out
    assert "0.125" in out
    code, out, _ = call("diff", runs / "a" / "checkpoints" / "step-00000010", runs / "c" / "checkpoints", "--step", 20)
    assert code == 2
    code, out, _ = call(
        "diff", runs / "a" / "checkpoints" / "step-00000020", runs / "c", "--json", "--prefix", "model."
    )
    document = json.loads(out)
    assert (code, document["num_tensors"]) == (1, 21)
    assert document["differences"][0]["name"] == "model.norm.weight"


def test_a_prefix_that_no_tensor_has_is_no_proof(call, runs):
    code, _, err = call("diff", runs / "a", runs / "a", "--prefix", "modle.")
    assert code == 2
    assert "'modle.'" in err
    assert "model., optimizer." in err


def test_diff_of_runs_without_a_common_step_says_which_steps_there_are(call, runs, tmp_path):
    make_run(tmp_path / "d", [7])
    code, _, err = call("diff", runs / "a", tmp_path / "d")
    assert code == 2
    assert "has 10, 20, 30" in err
    assert "has 7" in err
    code, _, err = call("diff", runs / "a", runs / "b", "--step", 30)
    assert code == 2
    assert "has no step 30; it has 10, 20" in err


def test_diff_of_a_damaged_commit_is_a_wrong_request(call, runs, tmp_path):
    run = shutil.copytree(runs / "b", tmp_path / "b")
    (run / "checkpoints" / "step-00000020" / "index.json").write_text("{}")
    code, _, err = call("diff", runs / "a", run)
    assert code == 2
    assert "index.json" in err


def test_weights_go_out_to_hugging_face_and_come_back_bit_for_bit(call, runs, tmp_path):
    code, out, _ = call("export", runs / "b", tmp_path / "hf", "--to", "hf")
    assert code == 0
    assert "model.safetensors" in out
    code, out, _ = call("import", tmp_path / "hf", tmp_path / "new", "--json")
    commit = open_commit(Path(json.loads(out)["path"]))
    assert (code, commit.step, commit.state["has_optimizer"]) == (0, 0, False)
    assert not commit.has("optimizer.")
    wanted = [whole(name, torch.zeros_like(tensor)) for name, tensor in weights().items()]
    commit.read_into(wanted)
    assert all(torch.equal(piece.tensor, weights()[piece.name]) for piece in wanted)


def test_an_import_is_continued_by_any_recipe_with_the_models_shape_and_no_other(call, runs, tmp_path):
    call("export", runs / "a", tmp_path / "hf")
    call("import", tmp_path / "hf", tmp_path / "new")
    recipe = open_commit(tmp_path / "new" / "checkpoints" / "step-00000000").recipe
    require_same_run(recipe, Recipe(model=MODEL, data=Data(seq_len=64), run=Run(seed=5)), "here")
    other = MODEL.model_copy(update={"num_layers": 3})
    with pytest.raises(AnotherRunError, match=r"model.num_layers: 2 there, 3 here"):
        require_same_run(recipe, Recipe(model=other), "here")


def test_an_export_in_bf16_is_half_as_large(call, runs, tmp_path):
    call("export", runs / "a", tmp_path / "full")
    assert call("export", runs / "a", tmp_path / "half", "--dtype", "bf16")[0] == 0
    full, half = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("full", "half"))
    assert 0.4 < half / full < 0.6


def test_an_import_never_touches_a_run_that_has_commits(call, runs, tmp_path):
    call("export", runs / "a", tmp_path / "hf")
    code, _, err = call("import", tmp_path / "hf", runs / "b")
    assert code == 2
    assert "holds commits already" in err


def test_an_import_of_what_is_no_model_folder_leaves_nothing(call, tmp_path):
    (tmp_path / "hf").mkdir()
    code, _, err = call("import", tmp_path / "hf", tmp_path / "new")
    assert code == 2
    assert "config.json" in err
    assert not (tmp_path / "new").exists()
