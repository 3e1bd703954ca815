"""Numbers as people read them."""

import math
from datetime import UTC, datetime

ABSENT = "\u2013"


def show_bytes(value: float) -> str:
    """`1.2 GiB`; a dash for NaN."""
    if not math.isfinite(value):
        return ABSENT
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    raise AssertionError("the loop returns at its last unit")


def show_count(value: float) -> str:
    """`12.3 M`; a dash for NaN."""
    if not math.isfinite(value):
        return ABSENT
    for unit in ("", " k", " M", " G", " T"):
        if abs(value) < 1000 or unit == " T":
            return f"{value:.4g}{unit}"
        value /= 1000
    raise AssertionError("the loop returns at its last unit")


def show_duration(seconds: float) -> str:
    """`1 h 02 min`, `3 min 20 s`, `12.3 s` or `45 ms`; a dash for NaN."""
    if not math.isfinite(seconds):
        return ABSENT
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"


def show_percent(value: float) -> str:
    """`42.1 %`; a dash for NaN."""
    return f"{value:.1%}".replace("%", " %") if math.isfinite(value) else ABSENT


def show_number(value: float) -> str:
    """Five significant digits; a dash for NaN."""
    return f"{value:.5g}" if math.isfinite(value) else ABSENT


def show_time(seconds: float) -> str:
    """A moment, in UTC; a dash for NaN or what no calendar has."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return ABSENT
