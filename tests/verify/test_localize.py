"""Two captures that differ: the module that computes otherwise is named, its operator, and rounding is no fault."""

import json

import pytest
from tests.capture.runs import SMALL, capture
from tests.mutants import numeric_faults
from tests.ranks import run_ranks

from drumline import models
from drumline.capture.diff import diff
from drumline.capture.reading import CaptureError
from drumline.cli.app import main
from drumline.comm import read_place
from drumline.models import norm
from drumline.train.captured import capture_rank
from drumline.train.manifest import source_digest
from drumline.verify.localize import LIMIT, localize

SDPA = "model.attention=sdpa"


def run(recipe, wanted):
    run_ranks(recipe.layout.num_ranks, lambda: capture_rank(recipe, read_place(), wanted))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Captured with the operators of all modules, as older code is for a comparison with newer."""
    return capture(tmp_path_factory.mktemp("plain") / "c", SDPA, steps=(1,), level="ops", only=("*",))


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    return capture(tmp_path_factory.mktemp("tensors") / "c", SDPA, steps=(1,))


def located(a, b, folder):
    return localize(a, b, run, folder / "scratch", source=source_digest(), command="drumline numerics capture r.json")


def epsilon_of_one_norm_is_tenfold(monkeypatch):
    real = norm.RMSNorm.forward

    def forward(self, x):
        return norm.rms_norm(x, self.weight, 10 * self.eps) if self.is_wrong else real(self, x)

    monkeypatch.setattr(norm.RMSNorm, "is_wrong", False, raising=False)
    monkeypatch.setattr(norm.RMSNorm, "forward", forward)
    mark(monkeypatch, lambda model: setattr(model.layers[1].mlp_norm, "is_wrong", True))


def a_weight_has_the_other_sign(monkeypatch):
    mark(monkeypatch, lambda model: model.layers[1].mlp.down_proj.weight.data[3, 5].neg_())


def mark(monkeypatch, act):
    real = models.initialize

    def initialize(model, *rest, **options):
        real(model, *rest, **options)
        act(model)

    monkeypatch.setattr(models, "initialize", initialize)


FAULTS = [
    (epsilon_of_one_norm_is_tenfold, "layers.1.mlp_norm", "rms_norm", "models/norm.py"),
    (numeric_faults.rotary_tables_are_in_bf16, "layers.0.attention", "aten.mul", "models/rope.py"),
    (numeric_faults.softmax_is_in_bf16, "layers.0.attention", "aten.", "models/"),
    (a_weight_has_the_other_sign, "layers.1.mlp", "aten.mm", "models/layers.py"),
]


@pytest.mark.parametrize(("fault", "module", "operator", "line"), FAULTS)
def test_a_fault_is_found_in_its_module_and_operator(fault, module, operator, line, plain, tmp_path, monkeypatch):
    fault(monkeypatch)
    b = capture(tmp_path / "b", SDPA, "layout=dp2", steps=(1,))
    found = located(plain, b, tmp_path)
    assert found.module == module, found
    assert found.operator is not None, found.why_no_operator
    assert operator in found.operator.key
    assert f"/{module}" in found.operator.key
    assert found.operator.source.startswith(line)
    assert found.operator.rank in (0, 1)


def test_a_module_that_passes_a_difference_on_is_not_blamed(plain, tmp_path, monkeypatch):
    epsilon_of_one_norm_is_tenfold(monkeypatch)
    b = capture(tmp_path / "b", SDPA, steps=(1,))
    found = located(plain, b, tmp_path)
    verdicts = {each.key: each for each in found.tensors}
    assert verdicts["1/forward/layers.1.mlp"].is_passed_on
    assert verdicts["1/forward/layers.1.mlp"].verdict == "same"
    assert verdicts["1/forward/norm"].is_passed_on
    assert not verdicts["1/forward/layers.1.mlp_norm"].is_passed_on
    assert len(diff(plain, b).different) > 20


ROUNDING = [("layout=tp2",), ("layout=fsdp2", "memory.activation_checkpointing=full"), ("precision.compute=bf16",)]


@pytest.mark.parametrize("words", ROUNDING)
def test_rounding_is_reported_as_rounding(words, tensors, tmp_path):
    b = capture(tmp_path / "b", SDPA, *words, steps=(1,))
    found = located(tensors, b, tmp_path)
    assert (found.origin, found.module, found.operator) == ("", "", None)
    assert found.tensors
    assert max(each.ratio for each in found.tensors) < LIMIT / 2
    assert {each.verdict for each in found.tensors} <= {"same", "rounding"}


def test_a_setting_is_found_by_running_both_recipes_again(tensors, tmp_path):
    b = capture(tmp_path / "b", SDPA, "model.norm_eps=1e-4", steps=(1,))
    found = located(tensors, b, tmp_path)
    assert (found.module, found.origin) == ("layers.0.attention_norm", "1/forward/layers.0.attention_norm")
    assert "rms_norm.0@m0" in found.operator.key
    assert "gets the same bits" in found.operator.why


def test_code_that_is_gone_is_told_with_the_command_that_helps(tensors, tmp_path, monkeypatch):
    epsilon_of_one_norm_is_tenfold(monkeypatch)
    b = capture(tmp_path / "b", SDPA, steps=(1,))
    found = localize(tensors, b, run, tmp_path / "s", source="another", command="drumline numerics capture r.json")
    assert found.module == "layers.1.mlp_norm"
    assert found.operator is None
    assert "drumline numerics capture r.json --level ops --only '*'" in found.why_no_operator
    assert any("a was captured by other code" in note for note in found.notes)


def test_an_optimizer_is_blamed_where_gradients_are_right(tensors, tmp_path):
    b = capture(tmp_path / "b", SDPA, "optimizer.eps=1e-6", steps=(1,))
    found = located(tensors, b, tmp_path)
    assert (found.origin, found.module) == ("1/weight/output.weight", "")


def test_where_layouts_cut_modules_elsewhere_the_module_and_the_rank_are_named(tensors, tmp_path):
    b = capture(tmp_path / "b", SDPA, "layout=tp2", "model.norm_eps=1e-4", steps=(1,))
    found = located(tensors, b, tmp_path)
    assert found.module == "layers.0.attention_norm"
    assert "cut modules in other places" in found.why_no_operator
    assert next(each.rank for each in found.tensors if each.key == found.origin) in (0, 1)


def test_a_capture_without_all_values_is_refused_with_the_command_that_helps(tensors, tmp_path):
    part = capture(tmp_path / "a", SDPA, steps=(1,), only=("layers.0",))
    with pytest.raises(CaptureError, match=r"try: drumline numerics capture r\.json"):
        located(part, tensors, tmp_path)


def test_the_command_tells_it_in_all_its_forms(tmp_path, capsys):
    small = [*SMALL, SDPA, "--steps", "1"]
    for name, words in (("a", []), ("b", ["model.norm_eps=1e-4", "layout=dp2"])):
        assert main(["numerics", "capture", "llama3-debug", *small, *words, "--out", str(tmp_path / name)]) == 0
    words = ["numerics", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--localize"]
    capsys.readouterr()
    assert main([*words, "--html", str(tmp_path / "d.html")]) == 1
    out = capsys.readouterr().out
    assert "layers.0.attention_norm computes otherwise: 1/forward/layers.0.attention_norm is" in out
    assert "rms_norm.0@m0 at models/norm.py:" in out
    assert "layers.0.attention_norm computes otherwise" in (tmp_path / "d.html").read_text()
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["localized"]
    assert (found["module"], found["operator"]["rank"]) == ("layers.0.attention_norm", 0)
    assert main([*words[:3], str(tmp_path / "a"), "--localize"]) == 0
