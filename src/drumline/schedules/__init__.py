"""Pipeline schedules: which rank computes what on which micro-batch, in which order. Imports no torch.

In: a schedule's name, ranks, micro-batches and stages a rank, or a file. Out: a `Schedule`, the one object that is
checked, simulated, drawn and executed; its faults; its timeline.
"""

from drumline.schedules.action import Action, Kind
from drumline.schedules.catalog import SCHEDULES, generate
from drumline.schedules.checking import Fault, ScheduleError, check, faults
from drumline.schedules.drawing import draw_text
from drumline.schedules.execution import peak_in_flight
from drumline.schedules.schedule import Schedule, looped, v_shaped
from drumline.schedules.simulation import Durations, Span, Timeline, simulate, uniform
from drumline.schedules.svg import draw_html, draw_svg
from drumline.schedules.text import from_csv, read_file, to_csv

__all__ = [
    "SCHEDULES",
    "Action",
    "Durations",
    "Fault",
    "Kind",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "check",
    "draw_html",
    "draw_svg",
    "draw_text",
    "faults",
    "from_csv",
    "generate",
    "looped",
    "peak_in_flight",
    "read_file",
    "simulate",
    "to_csv",
    "uniform",
    "v_shaped",
]
