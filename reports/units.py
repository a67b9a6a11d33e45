"""Numbers with units as a person reads them: three significant digits, a prefix, a unit."""

from __future__ import annotations

import datetime
import math

MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
MINUS = "\N{MINUS SIGN}"


def number(value: float) -> str:
    """Three significant digits with a thousands prefix: `0.0123`, `4.56`, `12.3 k`, `7.89 M`."""
    if not math.isfinite(value):
        return str(value)
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * scale:
            return f"{_three(value / scale)} {prefix}"
    return _three(value)


def _three(value: float) -> str:
    if value >= 99.95:  # the usual sizes, without a logarithm
        return f"{value:.0f}"
    if value >= 0.9995:
        return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value) * (1 + 5e-4))))
    return f"{value:.{digits}f}" if digits <= 6 else f"{value:.2e}"


def seconds(value: float) -> str:
    """`850 ms`, `12.3 s`, `3 min 20 s`, `2 h 05 min`."""
    if not math.isfinite(value):
        return str(value)
    if value < 1e-3:
        return f"{_three(value * 1e6)} µs"
    if value < 1:
        return f"{_three(value * 1e3)} ms"
    if value < 120:
        return f"{_three(value)} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min"


def memory(value: float) -> str:
    """Bytes with a binary prefix: `512 MiB`, `1.25 GiB`."""
    for prefix, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{_three(value / scale)} {prefix}"
    return f"{value:.0f} B"


def lines(added: int, deleted: int) -> str:
    """Changed lines: a plus and what was added, a minus sign and what was deleted."""
    return f"+{added:,} {MINUS}{deleted:,}"


def parsed(stamp: str) -> datetime.datetime | None:
    """An RFC 3339 time stamp, in UTC; None when it is none."""
    try:
        moment = datetime.datetime.fromisoformat(stamp)
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or datetime.UTC).astimezone(datetime.UTC)


def span(begin: str, end: str) -> str:
    """From one time stamp to another: `12 June 2026, 14:03 to 14:21 UTC`."""
    first, last = moment(begin), moment(end)
    if first == last:
        return first
    day, _, clock = last.rpartition(", ")
    if day and first.startswith(f"{day}, "):
        return f"{first.removesuffix(' UTC')} to {clock}"
    return f"{first} to {last}"


def moment(stamp: str) -> str:
    """A time stamp in words: `12 June 2026, 14:03 UTC`; the text itself when it is none."""
    time = parsed(stamp)
    return f"{time.day} {MONTHS[time.month - 1]} {time.year}, {time.hour:02}:{time.minute:02} UTC" if time else stamp
