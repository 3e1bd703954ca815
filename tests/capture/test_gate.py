"""The gate's tiers, what it refuses, and what it writes."""

import json
import shutil
from xml.etree import ElementTree as Xml

import pytest
import torch
from tests.capture.test_diff import change
from tests.mutants.gated import STORED, judged, record

from drumline.capture.baseline import Limit, deviation, limit_of, read_baseline, statistics_of
from drumline.capture.gate import gate
from drumline.capture.ratio import EPS, error_of, error_ratio
from drumline.capture.reading import Capture, CaptureError
from drumline.cli.app import main


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate")
    record(folder / "c", ("layout=dp2",), steps=(1,))
    return folder / "c"


@pytest.fixture
def copy(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "copy")


def test_the_stored_baseline_holds_for_this_code_in_both_precisions(tmp_path):
    assert judged(tmp_path / "a").passes
    assert judged(tmp_path / "b", ("precision.compute=bf16",)).passes


def test_every_limit_has_its_reason_and_every_tensor_its_error():
    baseline = read_baseline(STORED)
    assert set(baseline.limits) == {"A", "B", "C fp32", "C bf16"}
    for kinds in baseline.limits.values():
        assert {"forward", "backward", "loss", "norm", "gradient", "optimizer", "weight"} <= kinds.keys()
        assert all(limit.reason and limit.limit >= limit.worst for limit in kinds.values())
    assert all(errors.keys() == set(baseline.keys) for errors in baseline.errors.values())


def test_a_ratio_is_of_errors_and_has_a_floor():
    exact = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)  # of norm 3
    mine = exact + torch.tensor([0.0, 3e-3, 4e-3])
    assert error_of(mine, exact) == pytest.approx(5e-3)
    assert error_ratio(5e-3, exact, 1e-3, "fp32") == pytest.approx(5.0)
    assert error_ratio(5e-3, exact, 0.0, "bf16") == pytest.approx(5e-3 / (3 * EPS["bf16"]))
    assert error_ratio(0.0, exact, 0.0, "fp32") == 0.0
    assert error_ratio(1.0, torch.zeros(2), 0.0, "fp32") == float("inf")


def test_a_limit_is_a_margin_over_the_worst_variant_but_never_too_small():
    assert limit_of("A", [(1.0, "dp2", "x"), (2.0, "tp2", "y")]) == Limit(
        6.0, 2.0, "3 times the worst variant, tp2 at y: 2"
    )
    assert limit_of("A", [(0.5, "dp2", "x")]).limit == 3.0


def test_statistics_see_a_scale_a_shift_an_extreme_and_what_is_not_finite():
    x = torch.linspace(-1, 1, 101, dtype=torch.float64)
    exact = statistics_of(x)
    assert deviation(exact, exact) == 0.0
    assert deviation(statistics_of(x * 1.01), exact) == pytest.approx(0.01)
    assert deviation(statistics_of(x + 0.05), exact) >= 0.05
    assert deviation(statistics_of(torch.cat([x, x.new_tensor([9.0])])), exact) > 1.0
    assert deviation(statistics_of(torch.cat([x, x.new_tensor([float("nan")])])), exact) == float("inf")


def test_statistics_alone_are_judged_in_tiers_c_and_d_and_hashes_in_d(tmp_path, capsys):
    stats = judged(tmp_path / "a", level="stats", steps=(1,))
    assert stats.passes
    assert {check.tier for check in stats.checks} == {"C", "D"}
    assert [tier for tier, _ in stats.skipped] == ["A"]
    hashes = judged(tmp_path / "b", ("layout=dp2",), level="hash", steps=(1,))
    assert hashes.passes
    assert {check.tier for check in hashes.checks} == {"D"}
    assert main(["numerics", "gate", str(tmp_path / "a"), "--against", str(STORED)]) == 0
    assert "tier A did not run: needs --level tensors" in capsys.readouterr().out


def test_it_names_the_first_tensor_writes_junit_and_ends_with_1(copy, tmp_path, capsys):
    change(copy, "1/gradient/layers.1.mlp.up_proj.weight", lambda tensor: tensor * 1.001)
    change(copy, "1/gradient/layers.1.mlp.up_proj.weight", lambda tensor: tensor * 1.001, rank=1)
    command = ["numerics", "gate", str(copy), "--against", str(STORED), "--junit", str(tmp_path / "out.xml")]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "  1/gradient/layers.1.mlp.up_proj.weight is " in out
    assert "0 of 1 captures pass" in out
    suite = Xml.parse(tmp_path / "out.xml").getroot().find("testsuite")
    failures = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    assert failures[0] == "1/gradient/layers.1.mlp.up_proj.weight"
    assert int(suite.get("failures")) == len(failures)
    assert int(suite.get("tests")) == len(list(suite.iter("testcase")))


def test_a_replica_that_differs_in_its_last_bit_fails_tier_d(copy):
    change(copy, "1/gradient/norm.weight", lambda tensor: torch.nextafter(tensor, 2 * tensor), rank=1)
    found = gate(Capture(copy), read_baseline(STORED))
    assert [(check.tier, check.key) for check in found.failed] == [("D", "1/gradient/norm.weight")]


def test_json_is_one_document(copy, capsys):
    assert main(["numerics", "gate", str(copy), "--against", str(STORED), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passes"]
    assert document["captures"][0]["layout"] == "dp2"


def test_another_recipe_or_other_steps_are_not_comparable(tmp_path, capsys):
    record(tmp_path / "a", ("optimizer.eps=1e-5",), steps=(1,))
    record(tmp_path / "b", steps=(3,))
    for name, said in (("a", "optimizer.eps = 1e-05, in the baseline 0.001"), ("b", "has steps [3]")):
        assert main(["numerics", "gate", str(tmp_path / name), "--against", str(STORED)]) == 2
        assert said in capsys.readouterr().err


def test_what_is_no_baseline_is_refused(tmp_path, copy, capsys):
    assert main(["numerics", "gate", str(copy), "--against", str(tmp_path)]) == 2
    assert "is no baseline" in capsys.readouterr().err
    broken = shutil.copytree(STORED, tmp_path / "broken")
    (broken / "baseline.json").write_text('{"format": 7}')
    with pytest.raises(CaptureError, match="format 7"):
        read_baseline(broken)


def test_drumline_s_own_failure_ends_with_3(copy, capsys, monkeypatch):
    from drumline.capture import gate as module

    def fail(*args):
        raise ZeroDivisionError("no")

    monkeypatch.setattr(module, "_values", fail)
    assert main(["numerics", "gate", str(copy), "--against", str(STORED)]) == 3
    assert "drumline failed: ZeroDivisionError" in capsys.readouterr().err
