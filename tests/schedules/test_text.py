"""Schedules as CSV: round trip, torch's form, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.recipe.errors import DrumlineError
from drumline.schedules import SCHEDULES, from_csv, generate, read_file, to_csv


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.integers(1, 6), st.integers(1, 12))
def test_what_is_written_is_read_back(name, ranks, microbatches):
    schedule = generate(name, ranks, microbatches)
    assert from_csv(to_csv(schedule), name) == schedule


def test_idle_steps_communication_and_pairs_of_torch_are_read():
    read = from_csv(",0F0, 0SEND_F0 ,1RECV_F0,(1F0;0B0)OVERLAP_F_B,,0UNSHARD,1REDUCE_GRAD,1I0,1W0\r\n", "torch")
    assert to_csv(read) == "0F0,1F0,0B0,1I0,1W0\n"
    assert (read.placement, read.num_microbatches) == ((0, 0), 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 has no action"),
        ("0F0,0B0\n\n1F0,1B0", "line 2 has no action"),
        ("0F0,0B0\n1F0,1X0", "line 2, cell 2 is '1X0', which is no action"),
        ("0F0,0B", "line 1, cell 2 is '0B', which is no action"),
        ("0F-1", "cell 1 is '0F-1'"),
        ("0F0,(0F1;)OVERLAP_F_B", "cell 2 is"),
        ("0F0,0B0\n2F0,2B0", "has stage 2 but no action of stage 1"),
        ("0F0,0F999999999", "has micro-batch 999999999 but no action of micro-batch 1;"),
        ("0F" + "9" * 5000, "which is no action"),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_place(text, message):
    with pytest.raises(DrumlineError) as raised:
        from_csv(text, "file.csv")
    assert message in str(raised.value)
    assert str(raised.value).startswith("file.csv: ")
    assert len(str(raised.value)) < 250


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe")
    for name, reason in (("absent.csv", "No such file"), ("binary.csv", "it is not text"), ("", "Is a directory")):
        with pytest.raises(DrumlineError, match=reason):
            read_file(tmp_path / name)
