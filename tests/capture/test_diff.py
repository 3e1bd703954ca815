"""Differences are found, named in the order of a step, and told; what cannot be compared is refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.capture.runs import capture

from drumline.capture.diff import NotComparableError, diff
from drumline.capture.reading import Capture, CaptureError
from drumline.cli.app import main


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    capture(folder / "c", steps=(1,))
    return folder / "c"


@pytest.fixture
def copy(base, tmp_path):
    import shutil

    return shutil.copytree(base, tmp_path / "copy")


def change(folder, key, edit, rank=0):
    """Edits the first part of a key in a rank's file."""
    (path,) = folder.glob(f"step-*/rank-{rank:05d}.safetensors")
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    index = [entry["key"] for entry in json.loads(metadata["parts"])].index(key)
    tensors[str(index)] = edit(tensors[str(index)].clone())
    save_file(tensors, path, metadata=metadata)


def flip_sign(tensor):
    tensor.view(-1)[5] *= -1
    return tensor


def test_a_capture_equals_itself(base, copy, capsys):
    assert main(["numerics", "diff", str(base), str(copy)]) == 0
    assert "tensors are equal bit for bit" in capsys.readouterr().out


def test_one_flipped_sign_is_found_named_and_placed(base, copy, capsys):
    change(copy, "1/gradient/layers.1.mlp.up_proj.weight", flip_sign)
    found = diff(Capture(base), Capture(copy))
    (row,) = found.different
    assert found.first == row.key == "1/gradient/layers.1.mlp.up_proj.weight"
    assert (row.difference.num_unequal, row.difference.at, row.holders) == (1, (0, 5), ((0, -1), (0, -1)))
    assert main(["numerics", "diff", str(base), str(copy)]) == 1
    out = capsys.readouterr().out
    assert f"1 of {len(found.rows)} tensors are not equal bit for bit" in out
    assert "most at [0, 5]; rank 0 of a; rank 0 of b" in out


def test_the_first_in_the_order_of_a_step_is_named_and_activations_name_their_micro_batch(base, copy):
    change(copy, "1/gradient/output.weight", flip_sign)
    change(copy, "1/forward/layers.1.mlp", flip_sign)
    change(copy, "1/forward/norm", flip_sign)
    found = diff(Capture(base), Capture(copy))
    assert found.first == "1/forward/layers.1.mlp"
    assert found.different[0].holders == ((0, 0), (0, 0))
    assert [row.key for row in found.different][-1] == "1/gradient/output.weight"


def test_a_tolerance_lets_rounding_pass_but_no_not_a_number(base, copy):
    change(copy, "1/forward/norm", lambda tensor: tensor * (1 + 2.0**-20))
    assert not diff(Capture(base), Capture(copy)).is_equal
    assert diff(Capture(base), Capture(copy), tolerance=1e-5).is_equal
    change(copy, "1/forward/norm", lambda tensor: tensor.index_fill(0, torch.tensor(3), float("nan")))
    assert diff(Capture(base), Capture(copy), tolerance=1e-5).first == "1/forward/norm"


def test_replicas_that_differ_in_one_bit_are_found_in_one_capture_alone(tmp_path):
    capture(tmp_path / "c", "layout=dp2", steps=(1,))
    change(tmp_path / "c", "1/weight/norm.weight", lambda tensor: tensor * (1 + 2.0**-22), rank=1)
    two = Capture(tmp_path / "c")
    found = diff(two, two)
    assert found.first == "1/weight/norm.weight"
    assert "hold the same elements differ" in found.different[0].why


def test_json_has_every_measure_of_every_tensor(base, copy, capsys):
    change(copy, "1/forward/norm", flip_sign)
    assert main(["numerics", "diff", str(base), str(copy), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["equal"], document["first"], document["num_different"]) == (False, "1/forward/norm", 1)
    row = next(row for row in document["tensors"] if row["key"] == "1/forward/norm")
    assert row["difference"]["max_ulp"] > 0
    assert row["difference"]["num_unequal"] == 1
    assert len(document["tensors"]) == document["num_tensors"]


def test_other_models_and_other_steps_are_not_comparable(base, tmp_path, capsys):
    wider = capture(tmp_path / "wider", "model.dim=64", steps=(1,))
    with pytest.raises(NotComparableError, match=r"model\.dim = 32 in .*, 64 in"):
        diff(Capture(base), wider)
    later = capture(tmp_path / "later", steps=(3,))
    with pytest.raises(NotComparableError, match=r"no tensor in common \(steps \[1\] and \[3\]\)"):
        diff(Capture(base), later)
    assert main(["numerics", "diff", str(base), str(tmp_path / "wider")]) == 2
    assert "shape" in capsys.readouterr().err


def test_another_setting_of_the_maths_is_told(base, tmp_path, capsys):
    capture(tmp_path / "other", "optimizer.eps=1e-6", steps=(1,))
    assert main(["numerics", "diff", str(base), str(tmp_path / "other")]) == 1
    out = capsys.readouterr().out
    assert "the recipes differ: optimizer.eps = 0.001 in a, 1e-06 in b" in out
    assert "1/weight/output.weight" in out


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda c: (c / "capture.json").unlink(), "was not finished"),
        (lambda c: next(c.glob("step-*/rank-*")).unlink(), "lacks files"),
        (lambda c: (c / "capture.json").write_text("{"), "cannot be read"),
        (lambda c: (c / "capture.json").write_text('{"format": 9}'), "another version"),
        (lambda c: next(c.glob("step-*/rank-*")).write_bytes(b"\x00" * 20), "is no file of a capture"),
    ],
)
def test_what_is_no_whole_capture_is_refused(base, copy, damage, said, capsys):
    damage(copy)
    assert main(["numerics", "diff", str(base), str(copy)]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_cut_off_is_named(base, copy, capsys):
    path = next(copy.glob("step-*/rank-*"))
    path.write_bytes(path.read_bytes()[:-100])
    assert main(["numerics", "diff", str(base), str(copy)]) == 2
    assert "is cut off" in capsys.readouterr().err


def test_no_capture_at_all_is_refused(tmp_path):
    with pytest.raises(CaptureError, match="is no capture"):
        Capture(tmp_path)
