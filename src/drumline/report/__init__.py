"""Run directories as self-contained HTML, and as a few numbers.

In: run directories. Out: one HTML file that opens offline, or a summary as plain values.
"""

from drumline.report.page import write_report
from drumline.report.run import ReportError, Run, read_run
from drumline.report.summary import Summary, summarize

__all__ = ["ReportError", "Run", "Summary", "read_run", "summarize", "write_report"]
