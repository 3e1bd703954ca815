"""`drumline report` as it is typed."""

import json

import pytest
from tests.report.made_runs import write_run

from drumline.cli.app import main


def test_one_run_is_reported_inside_its_directory(tmp_path, capsys):
    write_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 1_000_000
    assert str(tmp_path / "run" / "report.html") in capsys.readouterr().out


def test_several_runs_are_reported_where_one_stands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_run(tmp_path / name)
    assert main(["report", "a", "b"]) == 0
    assert (tmp_path / "report.html").exists()


def test_json_is_one_document_and_writes_nothing(tmp_path, capsys):
    write_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["runs"][0]["status"] == "done"
    assert document["report"] is None
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("folder", ["missing", "."])
def test_a_folder_that_is_no_run_ends_with_2_and_one_message(tmp_path, capsys, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    assert main(["report", folder]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_what_could_not_be_read_is_said_beside_the_path(tmp_path, capsys):
    write_run(tmp_path / "run")
    (tmp_path / "run" / "environment.json").unlink()
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "environment.json is missing" in capsys.readouterr().err
