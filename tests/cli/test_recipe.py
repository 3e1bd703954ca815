"""`drumline recipe` as a user sees it: output, JSON and exit codes."""

import json
import tomllib

import pytest

from drumline.cli.app import main
from drumline.recipe import builtin_names, load, num_parameters


@pytest.fixture
def run(capsys):
    """Runs a command line; returns exit code, stdout and stderr."""

    def run(*args):
        code = main([*map(str, args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_list_has_every_built_in_recipe_and_its_parameters(run):
    code, out, err = run("recipe", "list")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(builtin_names())
    assert "405,853,388,800" in out


def test_list_as_json_is_one_document(run):
    rows = json.loads(run("recipe", "list", "--json")[1])
    assert {row["name"]: row["num_parameters"] for row in rows}["llama3-8b"] == 8_030_261_248


@pytest.mark.parametrize("name", builtin_names())
def test_show_prints_toml_that_loads_back_with_the_count_as_a_comment(run, tmp_path, name):
    code, out, _ = run("recipe", "show", name)
    assert code == 0
    assert out.startswith(f"# {num_parameters(load(name).model):,} parameters")
    (tmp_path / "saved.toml").write_text(out)
    assert load(str(tmp_path / "saved.toml")) == load(name)


def test_show_takes_overrides(run):
    _, out, _ = run("recipe", "show", "llama3-debug", "layout=dp2.fsdp2", "run.steps=30")
    shown = tomllib.loads(out)
    assert (shown["layout"]["fsdp"], shown["run"]["steps"]) == (2, 30)


def test_show_as_json_has_recipe_count_and_digests(run):
    document = json.loads(run("recipe", "show", "llama3-debug", "--json")[1])
    assert document["num_parameters"] == 6_163_712
    assert document["recipe"]["model"]["dim"] == 256
    assert len(document["digest"]) == len(document["full_digest"]) == 64


def test_validate_of_a_sound_recipe_is_good(run):
    code, out, err = run("recipe", "validate", "llama3-debug")
    assert (code, err) == (0, "")
    assert out == "llama3-debug can run: 6,163,712 parameters, layout dp1 on 1 rank\n"


def test_validate_of_a_broken_recipe_is_a_failed_check_that_lists_everything(run):
    code, out, err = run("recipe", "validate", "llama3-debug", "layout=dp3", "model.head_dim=15", "--world-size", 2)
    assert (code, out) == (1, "")
    assert [line.rsplit("[")[-1].rstrip("]") for line in err.splitlines() if line.endswith("]")] == [
        "model-head-dim-even",
        "batch-divisible",
        "layout-world",
    ]


def test_what_validate_says_would_work_works(run):
    _, _, err = run("recipe", "validate", "llama3-debug", "layout=dp3.tp3", "--world-size", 2)
    mended = err.splitlines()[-1].removeprefix("this would work: drumline ").split()
    assert run(*mended, "--world-size", 2)[0] == 0


def test_what_validate_says_would_work_keeps_its_options(run):
    _, _, err = run("recipe", "validate", "llama3-debug", "layout=dp0", "--world-size", 2, "--device", "cpu")
    assert err.endswith(
        'nearest that work: "dp2", "fsdp2"      try: layout=dp2\n'
        "this would work: drumline recipe validate llama3-debug layout=dp2 --world-size 2 --device cpu\n"
    )


def test_validate_as_json_has_problems_for_programs(run):
    code, out, err = run("recipe", "validate", "llama3-debug", "optimizer.lr=nan", "run.step=3", "--json")
    document = json.loads(out)
    assert (code, err, document["valid"]) == (1, "", False)
    assert {problem["code"] for problem in document["problems"]} == {"not-finite", "unknown-key"}
    assert set(document["problems"][0]) == {"code", "key", "value", "rule", "nearest", "remedy"}
    assert json.loads(run("recipe", "validate", "llama3-debug", "--json")[1])["valid"] is True


def test_validate_knows_the_names_of_accelerators(run):
    assert run("recipe", "validate", "llama3-debug", "metrics.peak=h200")[0] == 0
    code, _, err = run("recipe", "validate", "llama3-debug", "metrics.peak=h2000")
    assert code == 1
    assert 'nearest that work: "h200"' in err


def test_a_recipe_that_does_not_exist_is_a_wrong_request(run):
    for command in ("show", "validate"):
        code, out, err = run("recipe", command, "lama3-8b")
        assert (code, out) == (2, "")
        assert err == (
            "no built-in recipe or file is called 'lama3-8b'; did you mean llama3-8b or llama3-3b or llama3-1b?\n"
        )


def test_a_broken_override_of_show_is_a_wrong_request(run):
    code, out, err = run("recipe", "show", "llama3-debug", "run.step=300")
    assert (code, out) == (2, "")
    assert "did you mean: run.steps" in err
    assert err.endswith("this would work: drumline recipe show llama3-debug run.steps=300\n")


def test_diff_exits_1_where_recipes_differ_and_says_what_changes_the_maths(run):
    code, out, _ = run("recipe", "diff", "llama3-8b", "llama3-8b", "layout=fsdp8", "optimizer.lr=1")
    assert code == 1
    rows = [line.split() for line in out.splitlines()[1:]]
    assert rows == [["optimizer.lr", "0.0003", "1.0", "yes"], ["layout.fsdp", "64", "8"]]


def test_diff_of_equal_recipes_is_good(run):
    assert run("recipe", "diff", "llama3-8b", "llama3-8b") == (0, "the recipes are equal\n", "")
    assert json.loads(run("recipe", "diff", "llama3-8b", "llama3-8b", "--json")[1]) == {
        "equal": True,
        "differences": [],
    }


def test_schema_is_one_json_document(run):
    code, out, _ = run("recipe", "schema")
    assert code == 0
    assert json.loads(out)["title"] == "drumline recipe"
    assert run("recipe", "schema", "--json")[1] == out


def test_no_escape_codes_reach_a_pipe(run):
    assert "\x1b" not in run("recipe", "list")[1]


def test_a_terminal_gets_a_bold_heading_unless_no_color_is_set(run, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert run("recipe", "list")[1].startswith("\x1b[1m")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run("recipe", "list")[1]


@pytest.mark.parametrize("command", ["list", "show", "validate", "diff", "schema"])
def test_every_command_has_help_and_json(run, command):
    code, out, _ = run("recipe", command, "--help")
    assert code == 0
    assert "--json" in out


@pytest.mark.parametrize("args", [("show",), ("diff", "llama3-8b"), ("validate", "llama3-8b", "--world-size", "0")])
def test_a_command_that_is_incomplete_or_out_of_range_is_a_usage_error(run, args):
    code, _, err = run("recipe", *args)
    assert code == 2
    assert "Error: " in err
