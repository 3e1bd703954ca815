"""Tests in several processes: each runs once, and what one finds is found."""

import re
from pathlib import Path

import pytest
from tests.side_by_side import LONGEST, Taken, read_summary, run, summary

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_here(tmp_path, monkeypatch):
    """Runs files of tests, given their texts; gives the exit status, what was said, and which tests ran."""
    folder, log = tmp_path / "suite", tmp_path / "log"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LOG", str(log))

    def start(texts, *arguments):
        folder.mkdir()
        (folder / "pytest.ini").write_text("[pytest]\naddopts = -q --import-mode=importlib\n")
        prelude = "import os\ndef note(name):\n    open(os.environ['LOG'], 'a').write(name + chr(10))\n"
        for name, text in texts.items():
            (folder / name).write_text(prelude + text)
        said: list[str] = []
        status = run([*arguments, "-p", "no:cacheprovider", str(folder)], 2, said.append)
        return status, said, sorted(log.read_text().split()) if log.exists() else []

    return start


def passing(name, num):
    return "".join(f"def test_{i}():\n    note('{name}{i}')\n" for i in range(num))


def test_every_test_runs_once_and_the_last_line_counts_them_all(run_here):
    status, said, ran = run_here({f"test_{name}.py": passing(name, 3) for name in "abcde"})
    assert (status, ran) == (0, [f"{name}{i}" for name in "abcde" for i in range(3)])
    assert re.fullmatch(r"15 passed in [\d.]+s", said[-1])
    assert sum("3 passed in" in line for line in said) == 5


def test_a_failure_is_shown_and_fails_the_whole(run_here):
    failing = "import pytest\ndef test_wrong():\n    assert 1 == 2\n@pytest.mark.skip\ndef test_left():\n    pass\n"
    status, said, _ = run_here({"test_a.py": passing("a", 2), "test_b.py": failing})
    assert status == 1
    assert any("assert 1 == 2" in text for text in said)
    assert any(re.search(r"^FAILED .*test_b.py::test_wrong", text, re.MULTILINE) for text in said)
    assert re.fullmatch(r"1 failed, 2 passed, 1 skipped in [\d.]+s", said[-1])


def test_a_file_that_cannot_be_collected_fails_the_whole(run_here):
    status, said, _ = run_here({"test_a.py": passing("a", 2), "test_b.py": "import there_is_no_such_module\n"})
    assert status != 0
    assert any("there_is_no_such_module" in text for text in said)


def test_a_process_that_dies_fails_the_whole_and_is_named(run_here):
    dying = "import signal\ndef test_dies():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    status, said, ran = run_here({"test_a.py": dying, "test_b.py": passing("b", 2)})
    assert (status != 0, ran) == (True, ["b0", "b1"])
    assert any("ended by SIGKILL" in text for text in said)
    assert re.fullmatch(r"2 passed, 1 error in [\d.]+s", said[-1])


def test_a_file_is_taken_once_and_none_after_a_stop(tmp_path):
    one, other = Taken(tmp_path), Taken(tmp_path)
    assert one.take("tests/a/test_b.py")
    assert not other.take("tests/a/test_b.py")
    one.finish("tests/a/test_b.py", "2 passed")
    assert other.finished() == {"tests/a/test_b.py": "2 passed"}
    one.stop()
    assert not other.take("tests/c.py")


def test_a_summary_is_read_as_it_is_written():
    counts = read_summary("1 failed, 2 passed, 3 deselected in 61.20s (0:01:01)")
    assert counts == {"failed": 1, "passed": 2, "deselected": 3}
    assert summary(counts) == "1 failed, 2 passed, 3 deselected"
    assert read_summary("FAILED tests/x.py::test_y in the end") is None


def test_the_files_that_come_first_are_there():
    assert [path for path in LONGEST if not (ROOT / path).exists()] == []
