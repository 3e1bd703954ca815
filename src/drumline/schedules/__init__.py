"""Pipeline schedules: which rank computes what on which micro-batch, in which order. Imports no torch.

In: a schedule's name, ranks, micro-batches and stages a rank, or a file. Out: a `Schedule`, the one object that is
checked, simulated, drawn and executed; its faults; its timeline.
"""

from drumline.schedules.action import Action, Kind
from drumline.schedules.catalog import SCHEDULES, generate
from drumline.schedules.checking import Fault, ScheduleError, check, faults
from drumline.schedules.drawing import draw_text
from drumline.schedules.execution import peak_in_flight
from drumline.schedules.measured import mean_durations, read_timeline, schedule_of, timeline_to_json
from drumline.schedules.program import Receive, Send, Step, forwards_only, handed_over, programs
from drumline.schedules.schedule import Schedule, looped, v_shaped
from drumline.schedules.simulation import Durations, Span, Timeline, simulate, uniform
from drumline.schedules.split import split_layers
from drumline.schedules.svg import draw_html, draw_svg, draw_together
from drumline.schedules.text import from_csv, read_file, to_csv

__all__ = [
    "SCHEDULES",
    "Action",
    "Durations",
    "Fault",
    "Kind",
    "Receive",
    "Schedule",
    "ScheduleError",
    "Send",
    "Span",
    "Step",
    "Timeline",
    "check",
    "draw_html",
    "draw_svg",
    "draw_text",
    "draw_together",
    "faults",
    "forwards_only",
    "from_csv",
    "generate",
    "handed_over",
    "looped",
    "mean_durations",
    "peak_in_flight",
    "programs",
    "read_file",
    "read_timeline",
    "schedule_of",
    "simulate",
    "split_layers",
    "timeline_to_json",
    "to_csv",
    "uniform",
    "v_shaped",
]
