"""`drumline bench invariance` as a user sees it: table, JSON, exit codes."""

import json

import pytest
import torch

from drumline.cli.app import main
from drumline.numerics import invariant


@pytest.fixture
def run(capsys):
    """Runs `drumline bench invariance`; returns exit code, stdout and stderr."""

    def run(*args):
        code = main(["bench", "invariance", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_every_operator_holds_and_a_million_outputs_of_each_are_compared(run):
    code, out, err = run("--quick", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert all(row["outputs"] >= 1e6 and row["moved"] == 0 for row in document["operators"])
    moved = {(row["operator"], row["dtype"]) for row in document["operators"] if row["torch_moved"]}
    assert {("matmul", "fp32"), ("linear", "fp32"), ("swiglu", "fp32"), ("elementwise", "bf16")} <= moved


def test_an_operator_whose_bits_move_fails_the_check(run, monkeypatch):
    monkeypatch.setattr(invariant, "matmul", torch.matmul)
    code, out, err = run("--quick", "--op", "matmul", "--dtype", "fp32")
    assert code == 1
    assert "bits moved in matmul in fp32" in err
    assert out.splitlines()[1].startswith("matmul    fp32   constructive")


def test_an_unknown_operator_or_dtype_is_refused_with_those_that_are_known(run):
    code, _, err = run("--op", "mat")
    assert code == 2
    assert "--op mat is not known\n  what works: matmul, linear, attention" in err
    assert run("--dtype", "fp8")[0] == 2


def test_the_list_says_what_is_known_of_each_operator(run):
    code, out, _ = run("--list", "--json")
    known = {row["operator"]: row for row in json.loads(out)}
    assert code == 0
    assert known["aten::mm"]["class"] == "unknown"
    assert known["aten::mm"]["instead"].endswith("invariant.linear")
    assert known["drumline::invariant_matmul"]["class"] == "constructive"
    assert known["aten::exp"]["class"] == "probed"
