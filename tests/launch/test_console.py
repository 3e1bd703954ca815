"""What rank 0 writes reaches the console as it is and the log as plain lines."""

import os
import pty
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.launch.console import Console, LineFilter


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (b"one\ntwo\n", b"one\ntwo\n"),
        (b"one\r\ntwo", b"one\ntwo\n"),
        (b"\x1b[32mgreen\x1b[0m\n", b"green\n"),
        (b"\r 10%\r 20%\r100%\ndone\n", b"100%\ndone\n"),
        (b"\r\x1b[2Kstep 1\n\r\x1b[2K 50%", b"step 1\n 50%\n"),
        ("\u2501 50 %\n".encode(), "\u2501 50 %\n".encode()),
    ],
)
def test_the_log_keeps_the_lines_that_would_stay_on_a_terminal(sent, kept):
    lines = LineFilter()
    assert lines.feed(sent) + lines.finish() == kept


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"\x1b[2K", b"bc"])), st.integers(1, 5))
def test_the_log_does_not_depend_on_how_the_bytes_arrive_in_pieces(parts, size):
    sent = b"".join(parts)
    whole, pieces = LineFilter(), LineFilter()
    at_once = whole.feed(sent) + whole.finish()
    in_pieces = b"".join(pieces.feed(sent[i : i + size]) for i in range(0, len(sent), size)) + pieces.finish()
    assert at_once == in_pieces


def test_a_pipes_text_reaches_console_and_log(tmp_path, capfd):
    console = Console(tmp_path / "log", tmp_path)
    console.start()
    with open(console.path, "w") as file:
        file.write("hello\n" * 50_000)
    console.close()
    assert capfd.readouterr().err == "hello\n" * 50_000
    assert (tmp_path / "log").read_text() == "hello\n" * 50_000


def test_a_rank_sees_a_terminal_where_the_launcher_has_one(tmp_path):
    outer, console_end = pty.openpty()
    saved = os.dup(2)
    os.dup2(console_end, 2)
    try:
        console = Console(tmp_path / "log", tmp_path)
        console.start()
        with open(console.path, "wb", buffering=0) as file:
            is_terminal = file.isatty()
            file.write(b"\r 50%\r100%\nbye\n")
        time.sleep(0.2)
        console.close()
    finally:
        os.dup2(saved, 2)
        os.close(saved)
    assert is_terminal
    assert os.read(outer, 1000) == b"\r 50%\r100%\r\nbye\r\n"
    assert (tmp_path / "log").read_text() == "100%\nbye\n"
    os.close(outer)
    os.close(console_end)
