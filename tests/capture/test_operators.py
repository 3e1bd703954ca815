"""Operators inside modules are recorded in every layout, told apart by phase, and lead to a fault's line."""

import json

import pytest
import torch
from tests.capture.runs import SMALL, capture
from tests.mutants import numeric_faults

from drumline.capture.diff import diff
from drumline.capture.files import DamagedCaptureError
from drumline.capture.keys import split_key
from drumline.capture.operators import read_operators
from drumline.capture.reading import Capture
from drumline.cli.app import main

ATTENTION = ("layers.*.attention",)
MOE = ("model.num_kv_heads=2", "model.moe.num_experts=4", "model.moe.expert_hidden_dim=32")
SDPA = "model.attention=sdpa"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return capture(tmp_path_factory.mktemp("plain") / "c", SDPA, steps=(1,), level="ops", only=ATTENTION)


def found(side, **wanted):
    return [each for _, each in side.operators() if all(getattr(each, name) == value for name, value in wanted.items())]


def test_forward_and_backward_are_what_autograd_says_of_a_projection(plain):
    (made,) = found(plain, module="layers.1.attention.q_proj", phase="forward", microbatch=3)
    assert (made.name, made.source.rpartition(":")[0], made.shape) == ("aten.mm", "models/layers.py", (32, 32))
    products = found(plain, module="layers.1.attention.q_proj", phase="backward", microbatch=3, name="aten.mm")
    assert [each.label for each in products] == ["aten.mm.0>aten.mm.0", "aten.mm.0>aten.mm.1"]
    weights = [each for each in products if "mm.0>aten.mm.0" in each.key]
    total = sum(
        each.digest.statistics.total
        for index in range(8)
        for each in found(plain, key=weights[0].key.replace("@m3", f"@m{index}"))
    )
    grad = plain.read("1/gradient/layers.1.attention.q_proj.weight").tensor.double()
    assert total == pytest.approx(float(grad.sum()), rel=1e-4)


def test_every_operator_of_a_module_is_seen_and_none_of_others(plain):
    modules = {each.module for _, each in plain.operators()}
    inner = {f"layers.{n}.attention{rest}" for n in (0, 1) for rest in ("", *(f".{w}_proj" for w in "qkvo"))}
    assert modules == inner
    attend = {each.name for each in found(plain, module="layers.0.attention", microbatch=0)}
    assert "aten._scaled_dot_product_flash_attention_for_cpu" in attend
    assert "aten._scaled_dot_product_flash_attention_for_cpu_backward" in attend
    assert not any("view" in name or "empty" in name or "_to_copy" in name for name in attend)


def test_the_recorded_statistics_are_those_of_the_module_s_output(plain):
    last = found(plain, module="layers.0.attention.o_proj", phase="forward")
    output = plain.read("1/forward/layers.0.attention").tensor.double()
    assert sum(each.digest.statistics.squares for each in last) == pytest.approx(float(output.square().sum()))


LAYOUTS = [
    ("layout=dp2",),
    ("layout=fsdp2",),
    ("layout=pp2",),
    pytest.param(("layout=pp2", "layout.pp_schedule=zbv", "model.num_layers=4"), marks=pytest.mark.slow),
    pytest.param(("layout=dp2.fsdp2",), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("words", LAYOUTS)
def test_layouts_that_do_not_cut_modules_run_the_operators_of_one_rank(words, plain, tmp_path):
    deeper = [word for word in words if word.startswith("model.")]
    one = capture(tmp_path / "one", SDPA, *deeper, steps=(1,), level="ops", only=ATTENTION) if deeper else plain
    mine = capture(tmp_path / "c", SDPA, *words, steps=(1,), level="ops", only=ATTENTION)
    both = diff(one, mine).operators
    assert both.num_compared == len(list(one.operators())) > 100
    assert not [row.key for row in both.different if "/forward/" in row.key]
    assert both.only == ((), ())
    assert {rank for rank, _ in mine.operators()} == set(range(mine.manifest.num_ranks))


CUTTING = [
    ("llama3-debug", ("layout=tp2",)),
    ("llama3-debug", ("layout=cp2",)),
    ("qwen3-moe-debug", (*MOE, "layout=fsdp2.ep2")),
]


@pytest.mark.parametrize(("base", "words"), CUTTING)
def test_collectives_pass_unharmed_where_modules_are_cut(base, words, tmp_path):
    watched = capture(tmp_path / "a", *words, base=base, level="ops", only=("*",))
    unwatched = capture(tmp_path / "b", *words, base=base)
    assert diff(watched, unwatched).is_equal
    keys = [each.key for _, each in watched.operators()]
    assert len(keys) == len(set(keys)) > 500
    assert not any("c10d" in key for key in keys)


def test_what_is_computed_again_is_tagged_and_has_the_same_bits(plain, tmp_path):
    again = capture(
        tmp_path / "c",
        SDPA,
        "memory.activation_checkpointing=full",
        steps=(1,),
        level="ops",
        only=ATTENTION,
    )
    both = diff(plain, again)
    assert both.is_equal
    forward = {each.key: each.digest for each in found(again, phase="forward")}
    recomputed = {each.key: each.digest for each in found(again, phase="recompute")}
    assert recomputed == {key.replace("/forward/", "/recompute/"): digest for key, digest in forward.items()}
    assert set(both.operators.only[1]) == set(recomputed)


def test_a_block_s_own_operators_are_tagged_when_they_run_again(tmp_path):
    made = capture(tmp_path / "c", "memory.activation_checkpointing=full", steps=(1,), level="ops", only=("layers.0",))
    again = found(made, module="layers.0", phase="recompute", microbatch=0)
    assert [each.name for each in again] == ["aten.add.Tensor"]  # that of the attention; nothing needs the second


def test_a_fault_is_told_with_operator_rank_and_line(plain, tmp_path, monkeypatch, capsys):
    numeric_faults.softmax_is_in_bf16(monkeypatch)
    capture(tmp_path / "c", SDPA, "layout=dp2", steps=(1,), level="ops", only=ATTENTION)
    monkeypatch.undo()
    both = diff(plain, Capture(tmp_path / "c")).operators
    assert any("aten._softmax" in key for key in both.only[1])
    assert both.culprit.key.startswith("1/forward/layers.0.attention")
    html = tmp_path / "d.html"
    assert main(["numerics", "diff", str(plain.folder), str(tmp_path / "c"), "--html", str(html)]) == 1
    assert "operators differ; the first that" in capsys.readouterr().out
    assert both.culprit.key.replace(">", "&gt;") in html.read_text()
    assert main(["numerics", "diff", str(plain.folder), str(tmp_path / "c"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["operators"]["different"][0]["source"].startswith("models/")


def test_an_operator_that_computes_otherwise_is_told_from_those_that_pass_it_on(tmp_path, monkeypatch):
    only = ("layers.*.attention_norm", "layers.*.attention")
    one = capture(tmp_path / "a", steps=(1,), level="ops", only=only)
    numeric_faults.epsilon_of_norms_is_tenfold(monkeypatch)
    both = diff(one, capture(tmp_path / "b", steps=(1,), level="ops", only=only)).operators
    culprit = both.culprit
    assert culprit.key.startswith("1/forward/layers.0.attention_norm/drumline.rms_norm.0")
    assert (culprit.inputs_are_equal, culprit.source.rpartition(":")[0]) == (True, "models/norm.py")
    passed_on = next(row for row in both.different if "layers.0.attention.q_proj" in row.key)
    assert not passed_on.inputs_are_equal
    assert diff(one, Capture(tmp_path / "b"), tolerance=10.0).is_equal


def test_layouts_that_cut_modules_elsewhere_are_not_compared_by_operators(plain, tmp_path, capsys):
    capture(tmp_path / "c", SDPA, "layout=tp2", steps=(1,), level="ops", only=ATTENTION)
    words = ["numerics", "diff", str(plain.folder), str(tmp_path / "c"), "--tolerance", "1e-5"]
    assert main(words) == 0
    assert "operators are not compared: dp1 and tp2 cut modules in other places" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--only 'layers.*.attention'"),
        (("run.compile=true", "--only", "*"), "try: run.compile=false"),
        (("--only", "attention"), "no module"),
    ],
)
def test_what_cannot_be_seen_is_refused(words, said, tmp_path, capsys):
    out = ["--steps", "1", "--level", "ops", "--out", str(tmp_path / "c")]
    assert main(["numerics", "capture", "llama3-debug", *SMALL, *words, *out]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_cut_off_is_named(plain, tmp_path):
    (path,) = plain.folder.glob("step-*/ops-*")
    (tmp_path / "ops").write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedCaptureError, match="is cut off"):
        read_operators(tmp_path / "ops")


def test_nothing_is_left_behind_and_no_bit_changes(plain, tmp_path):
    bare = capture(tmp_path / "c", SDPA, steps=(1,), only=ATTENTION)
    assert diff(plain, bare).is_equal
    assert all(torch.equal(plain.read(key).tensor, bare.read(key).tensor) for key in plain.keys)
    assert {split_key(key)[1] for key in plain.keys} == {split_key(key)[1] for key in bare.keys}


def test_a_last_stage_that_embeds_tokens_further_ahead_numbers_that_call_as_one_device_does(tmp_path):
    def embeddings(name, *words):
        words = ("model.num_kv_heads=4", "model.head_dim=48", "model.moe.expert_hidden_dim=32", *words)
        made = capture(tmp_path / name, *words, base="deepseek-v3-debug", steps=(1,), level="ops", only=("embedding",))
        return {each.key: each.digest.hash for each in found(made, phase="forward")}

    one, two = embeddings("one"), embeddings("two", "layout=pp2")
    assert {key.split("/")[2] for key in one} == {"embedding", "embedding#1"}
    assert one == two
