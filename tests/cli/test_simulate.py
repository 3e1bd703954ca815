"""`drumline simulate schedule` as a user sees it: output, JSON, files and exit codes."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from drumline.cli.app import main
from drumline.schedules import SCHEDULES, generate, to_csv

NUMBERS = ("--pp", 4, "--microbatches", 8)


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs `drumline simulate schedule`; returns exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*args):
        code = main(["simulate", "schedule", *map(str, args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_timeline_and_the_figures_of_each_rank_are_printed(run):
    code, out, err = run("--schedule", "1f1b", "--pp", 2, "--microbatches", 3)
    assert (code, err) == (0, "")
    assert out == (
        "1f1b: 2 ranks, 2 stages, 3 micro-batches; makespan 12, bubble 25.0%\n"
        "rank 0  F0 F1 ..... B0--- F2 B1--- .. B2---\n"
        "rank 1  .. F0 B0--- F1 B1--- F2 B2--- ......\n"
        "rank  stages  busy  idle  bubble  peak in flight\n"
        "   0  0          9     3   25.0%               2\n"
        "   1  1          9     3   25.0%               1\n"
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_json_has_order_and_times_of_every_action(run, name):
    code, out, err = run("--schedule", name, *NUMBERS, "--json")
    document = json.loads(out)
    schedule = generate(name, 4, 8)
    assert (code, err, document["faults"]) == (0, "", [])
    assert document["order"] == [list(map(str, actions)) for actions in schedule.order]
    assert document["placement"] == list(schedule.placement)
    assert [[action for action, _, _ in row] for row in document["spans"]] == document["order"]
    assert max(end for row in document["spans"] for _, _, end in row) == document["makespan"]
    assert document["busy"] == [24.0] * 4  # 8 micro-batches of 1 + 2, shared by the rank's stages


def test_the_help_names_every_schedule(run):
    _, out, _ = run("--help")
    assert all(name in out for name in SCHEDULES)


def test_all_compares_the_schedules_at_equal_work(run):
    code, out, _ = run("--schedule", "all", *NUMBERS)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(SCHEDULES)
    summaries = {each["schedule"]: each for each in json.loads(run("--schedule", "all", *NUMBERS, "--json")[1])}
    assert {sum(each["busy"]) for each in summaries.values()} == {96.0}
    assert summaries["1f1b"]["makespan"] == 33
    assert max(summaries["interleaved-1f1b"]["peak_in_flight"]) == 11
    assert max(summaries["interleaved-1f1b"]["peak_microbatches"]) == 5.5


def test_times_are_for_all_stages_or_for_each(run):
    def makespan(*times):
        return json.loads(run("--schedule", "zb-h1", "--pp", 2, "--microbatches", 1, *times, "--json")[1])["makespan"]

    assert makespan() == 1 + 1 + 1 + 1 + 1  # F F I I W, the other W beside them
    assert makespan("--forward", "1,7") == 11
    assert makespan("--backward", 4) == 2 + 2 * 2 + 2
    assert makespan("--backward", 4, "--input", 1) == 2 + 2 * 1 + 3
    assert makespan("--input", 5, "--weight", 3) == 2 + 2 * 5 + 3
    assert makespan("--backward", 4, "--weight", 0) == 2 + 2 * 4
    assert makespan("--latency", 0.5) == 6


def test_whole_backward_takes_input_and_weight_together_unless_it_is_given(run):
    def busy(*times):
        return json.loads(run("--schedule", "1f1b", "--pp", 1, "--microbatches", 1, *times, "--json")[1])["busy"]

    assert busy("--input", 5, "--weight", 3) == [9]
    assert busy("--input", 5, "--weight", 3, "--backward", 8.5) == [9.5]
    assert busy("--input", 1.5) == [3]


@pytest.mark.parametrize("form", ["svg", "html", "csv"])
def test_out_writes_a_file_that_is_named_on_the_last_line(run, tmp_path, form):
    path = tmp_path / f"timeline.{form}"
    code, out, _ = run("--schedule", "zbv", *NUMBERS, "--out", path)
    assert code == 0
    assert out.splitlines()[-1] == str(path)
    text = path.read_text()
    if form == "csv":
        assert text == to_csv(generate("zbv", 4, 8))
    elif form == "svg":
        assert ElementTree.fromstring(text).tag.endswith("svg")
    else:
        assert text.startswith("<!doctype html>")


def test_a_file_is_checked_and_simulated_like_what_is_generated(run, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(generate("dualpipev", 4, 8)))
    theirs, ours = (json.loads(run("--schedule", name, *NUMBERS, "--json")[1]) for name in (path, "dualpipev"))
    assert theirs.pop("schedule") == str(path)
    assert ours.pop("schedule") == "dualpipev"
    assert theirs == ours
    assert run("--schedule", path)[0] == 0


def test_a_file_with_faults_is_a_failed_check_that_names_them(run, tmp_path):
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    code, out, err = run("--schedule", path)
    assert (code, out) == (1, "")
    assert err == (
        f"schedule {path} has a fault:\nranks 0, 1 cannot go on: rank 0 at 0B0 waits for 1B0 of rank 1; "
        "rank 1 at 1F1 waits for 0F1 of rank 0   [deadlock]\n"
    )
    code, out, err = run("--schedule", path, "--json")
    assert (code, err) == (1, "")
    assert [fault["code"] for fault in json.loads(out)["faults"]] == ["deadlock"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("1f1b",), "1f1b needs --pp and --microbatches, such as --pp 4 --microbatches 8"),
        (("1f1b", "--pp", 4), "1f1b needs --microbatches"),
        (("1f2b",), "there is no schedule '1f2b'; did you mean 1f1b?"),
        (("absent.csv",), "the schedule absent.csv cannot be read: No such file or directory"),
        (("mine.csv", "--microbatches", 3), "--microbatches 3: the schedule in mine.csv has 2"),
        (("mine.csv", "--pp", 3), "--pp 3: the schedule in mine.csv has 2"),
        (("mine.csv", "--virtual", 2), "--virtual 2: the schedule in mine.csv has 1"),
        (("1f1b", *NUMBERS, "--virtual", 2), "1f1b has 1 stage a rank, not 2; with 2 there are interleaved-1f1b"),
        (("all", *NUMBERS, "--out", "x.svg"), "--schedule all takes neither --out nor --virtual"),
        (("1f1b", *NUMBERS, "--out", "x.pdf"), "--out x.pdf ends with '.pdf'; it can be written as .svg, .html, .csv"),
        (("1f1b", *NUMBERS, "--out", "absent/x.svg"), "absent/x.svg cannot be written: No such file or directory"),
        (("1f1b", *NUMBERS, "--forward", "1,2,3"), "--forward has 3 times, but 1f1b has 4 stages"),
        (("1f1b", *NUMBERS, "--forward", "fast"), "--forward 'fast' is neither a number nor numbers with commas"),
        (("1f1b", *NUMBERS, "--forward", "-1"), "a duration of forward is -1.0"),
        (("1f1b", *NUMBERS, "--input", "3"), "--input and --weight are parts of --backward"),
        (("1f1b", *NUMBERS, "--latency", "nan"), "a duration of the latency is nan"),
        (("1f1b", *NUMBERS, "--forward", 0, "--backward", 0), "every action takes no time"),
        (("1f1b", "--pp", 0, "--microbatches", 8), "Invalid value for '--pp'"),
        (("gpipe", "--pp", 10**6, "--microbatches", 10**6), "at most 1,000,000 are supported"),
    ],
)
def test_what_cannot_be_done_is_a_wrong_request_that_says_what_works(run, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text(to_csv(generate("1f1b", 2, 2)))
    code, out, err = run("--schedule", *args)
    assert (code, out) == (2, "")
    assert message in err
