"""The report of two captures: whole, offline, without scripts, and true."""

import re
import shutil
import subprocess

import pytest

from drumline.capture.diff import Diff, Row
from drumline.capture.metrics import Difference
from drumline.capture.reading import Manifest
from drumline.report.differences import render, write_differences
from drumline.report.run import ReportError

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</title><script>alert(1)</script>"
MANIFEST = Manifest({"precision": {"compute": "fp32"}}, "dp2", "tensors", (1,), (), 2, {"packages": {"torch": "2.13"}})
FAR = Difference(64, 9, 120, 0.25, 3.0, (1, 2), (1, 0.5), (2, 0.7), 0.1, (0, 1, 1))


def made(folder="runs/b", rows=True):
    equal = Row("1/forward/embedding", "equal", "", ("float32", "float32"), (8, 8), Difference(64))
    far = Row(
        "1/forward/norm", "different", "differs", ("float32", "float32"), (8, 8), FAR, map=[[0.0, 1.0], [-1.0, 0.2]]
    )
    found = (equal, far) if rows else (equal,)
    return Diff(("runs/a", folder), ("dp1", "dp2"), ("tensors",) * 2, 0.0, found, ((), ("1/recompute/x",)), (), ())


def test_it_names_the_first_that_differs_and_shows_its_measures_and_its_map():
    page = render(made(), (MANIFEST, MANIFEST))
    assert "1 of 2 tensors differ" in page
    assert re.search(r"The first in the order of a step: <code>1/forward/norm</code>", page)
    for shown in ("9 of 64", "120", "2.50e-01", "3.00e+00 at [1, 2]", "+1.0e-01", "only in b: 1 tensors"):
        assert shown in page
    assert page.count('fill="#d6221a"') == 1


def test_equal_captures_make_a_page_that_says_so():
    assert "All 1 tensors are equal bit for bit" in render(made(rows=False), (MANIFEST, MANIFEST))


def test_it_asks_nothing_of_a_network_has_no_script_and_text_stays_text():
    page = render(made(HOSTILE), (MANIFEST, MANIFEST))
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)=["']?https?:""", page)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ReportError, match="cannot be written"):
        write_differences(made(), tmp_path / "no" / "out.html", (MANIFEST, MANIFEST))


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_draws_a_bar_a_tensor(tmp_path):
    write_differences(made(), tmp_path / "out.html", (MANIFEST, MANIFEST))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr", "--dump-dom"]
    command = [CHROMIUM, *flags, f"--user-data-dir={tmp_path}/profile", (tmp_path / "out.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    flow = re.search(r'<svg class="flow".*?</svg>', done.stdout, re.DOTALL)[0]
    assert flow.count("<rect") == 2
    assert "Refused" not in done.stderr
