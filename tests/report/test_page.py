"""The page: complete, offline, and deaf to what runs try to say to it."""

import json
import re
import tomllib

import pytest
from tests.report.made_runs import write_run

from drumline.report import ReportError, read_run, write_report
from drumline.report.page import render

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def without_scripts(page: str) -> str:
    return re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run", num_steps=120, commits=(60, 120), resumed_at=(60,))
    return read_run(tmp_path / "run")


def test_every_curve_that_was_recorded_is_there(run):
    charts = {chart["key"]: chart for chart in data_of(render([run]))["charts"]}
    assert list(charts) == ["loss", "grad_norm", "lr", "tokens_per_s", "mfu", "memory_bytes", "step_s"]
    assert [series["kind"] for series in charts["loss"]["series"]] == ["raw", "smooth", "validation"]
    assert charts["loss"]["series"][2]["step"] == [0, 50, 100]
    assert charts["step_s"]["series"][1]["kind"] == "stall"


def test_a_curve_that_was_not_recorded_is_left_out(tmp_path):
    write_run(tmp_path / "run", has_mfu=False)
    assert "mfu" not in {chart["key"] for chart in data_of(render([read_run(tmp_path / "run")]))["charts"]}


def charts_of(folders):
    return {chart["key"]: chart for chart in data_of(render([read_run(folder) for folder in folders]))["charts"]}


def test_routers_are_drawn_layer_by_layer(tmp_path):
    write_run(tmp_path / "run", num_steps=40, moe_layers=(1, 3), dropped=0.1)
    charts = charts_of([tmp_path / "run"])
    assert [key for key in charts if key.startswith("router")] == [
        *("router.load_max", "router.load_min", "router.entropy", "router.dropped")
    ]
    series = charts["router.load_max"]["series"]
    assert [line["name"] for line in series] == ["layer 1", "layer 3"]
    assert series[1]["y"] == pytest.approx([4.5 + 1 / step for step in range(1, 41)], rel=1e-5)
    assert charts["router.dropped"]["series"][0]["y"] == [0.1] * 40


@pytest.mark.parametrize("num_runs", [1, 2])
def test_many_layers_or_runs_are_drawn_by_the_worst_load_and_the_mean(num_runs, tmp_path):
    layers = tuple(range(12)) if num_runs == 1 else (0, 1)
    folders = [tmp_path / str(index) for index in range(num_runs)]
    for folder in folders:
        write_run(folder, num_steps=40, moe_layers=layers)
    charts = charts_of(folders)
    assert "router.dropped" not in charts  # nothing was
    assert [len(chart["series"]) for key, chart in charts.items() if key.startswith("router")] == [num_runs] * 3
    assert charts["router.load_max"]["series"][0]["y"][0] == pytest.approx(2.5 + layers[-1])
    assert charts["router.load_min"]["series"][0]["y"][0] == pytest.approx(0.5 / (1 + layers[-1]), rel=1e-5)
    assert charts["router.entropy"]["series"][0]["y"][0] == pytest.approx(2.0 - 0.1 * sum(layers) / len(layers))


@pytest.mark.parametrize("router", [7, {}, {"layers": []}, {"layers": [0], "load_max": ["x"], "entropy": [1.0, 2.0]}])
def test_a_router_that_is_none_is_passed_over(router, tmp_path):
    rows = write_run(tmp_path / "run", num_steps=3, moe_layers=(0,))
    rows[-2]["router"] = router
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    y = charts_of([tmp_path / "run"])["router.load_max"]["series"][0]["y"]
    assert y == [2.5, 2.0, None]


def test_the_axes_of_tokens_and_hours_grow_with_the_steps(run):
    series = data_of(render([run]))["charts"][2]["series"][0]
    assert series["step"][-1] == 120
    assert series["tokens"][-1] == 120 * 4080
    assert series["hours"][-1] == pytest.approx(run["step_s"].sum() / 3600, rel=1e-5)


def test_the_page_asks_nothing_of_a_network(run):
    page = render([run])
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", without_scripts(page))
    assert page.count("plotly.js v") >= 1


def test_the_recipe_stands_there_as_toml_that_reads_back(run):
    import html

    code = html.unescape(re.search(r"<code>(.*?)</code>", render([run]), re.DOTALL)[1])
    assert tomllib.loads(code)["model"]["num_layers"] == 6


def test_text_of_a_run_never_becomes_markup(tmp_path):
    folder = tmp_path / "run"
    write_run(folder, num_steps=40, overrides={"name": HOSTILE, "run": {"name": HOSTILE}})
    (folder / "environment.json").write_text(json.dumps({HOSTILE: [HOSTILE]}))
    (folder / "checkpoints" / "step-00000007").mkdir(parents=True)
    row = {"kind": "start", "step": 0, "layout": HOSTILE, "world": HOSTILE, "resumed_from": HOSTILE}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n" + json.dumps({"kind": "end", "step": 1, "reason": HOSTILE}) + "\n")
    for runs in ([folder], [folder, folder]):
        page = render([read_run(each) for each in runs])
        assert "<img" not in without_scripts(page)
        assert "<script>alert" not in page
        assert data_of(page)["runs"][0]["name"] == HOSTILE


def test_runs_stand_side_by_side_with_their_differences(tmp_path):
    for name, lr in (("slow", 1e-4), ("fast", 1e-2)):
        write_run(tmp_path / name, overrides={"optimizer": {"lr": lr}})
    page = render([read_run(tmp_path / name) for name in ("slow", "fast")])
    assert [run["name"] for run in data_of(page)["runs"]] == ["slow", "fast"]
    assert re.search(r"<td>optimizer.lr</td><td>0.0001</td><td>0.01</td>", page)


def test_a_run_without_steps_has_a_page_without_curves(tmp_path):
    write_run(tmp_path / "run", num_steps=0, end=None)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    page = render([read_run(tmp_path / "run")])
    assert "No step has been recorded" in page
    assert "metrics.jsonl is missing" in page
    assert len(page) < 100_000  # plotly is not in it


def test_the_report_is_replaced_whole_and_nothing_is_left_beside_it(run, tmp_path):
    out = tmp_path / "out.html"
    out.write_text("old")
    write_report([run], out)
    assert out.read_text().endswith("</html>\n")
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_report_that_cannot_be_written_says_so(run, tmp_path):
    with pytest.raises(ReportError, match=r"nowhere/out.html cannot be written: No such file.*choose another file"):
        write_report([run], tmp_path / "nowhere" / "out.html")
