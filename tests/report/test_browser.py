"""The page in a real browser, where Chromium is installed: it draws, and logs no error."""

import re
import shutil
import subprocess

import pytest
from tests.report.made_runs import write_run

from drumline.report import read_run, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *QUIET]
FLAGS += ["--virtual-time-budget=10000", "--enable-logging=stderr", "--dump-dom"]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("num_runs", [1, 3])
def test_the_page_draws_every_chart_without_an_error(tmp_path, num_runs):
    for index in range(num_runs):
        write_run(tmp_path / f"run{index}", seed=index, resumed_at=(40,), commits=(40,))
    write_report([read_run(tmp_path / f"run{index}") for index in range(num_runs)], tmp_path / "out.html")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path}/profile", (tmp_path / "out.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert len(re.findall(r'class="plot js-plotly-plot"', shown.stdout)) == 7
    assert shown.stdout.count('class="scatterlayer') == 7
    assert "resumed" in re.sub(r"<script.*?</script>", "", shown.stdout, flags=re.DOTALL)
    assert ":CONSOLE" not in shown.stderr
