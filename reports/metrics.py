"""Speed and memory of a cell from its measurement attempts: the process is the sample, never the step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from matrix.journal import AttemptRecord
from matrix.judge import CellVerdict

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Sample:
    """What `n` processes measured.

    Attributes:
        median: the median over processes.
        low: lower end of the interval or of the range.
        high: upper end.
        n: the number of processes.
        spread: `interval` is a 95 % confidence interval of the median, `range` the smallest and largest value (fewer
            than six processes allow no such interval), `single` one process.
    """

    median: float
    low: float
    high: float
    n: int
    spread: Literal["interval", "range", "single"]


@dataclass(frozen=True)
class Speed:
    """How fast a cell is, and what it needs.

    Attributes:
        unit: of the throughput, such as `tokens/s`.
        throughput: over processes; None when no process had enough steady intervals.
        values: the throughput of each process, in the order of the attempts.
        step_s: steady step time in seconds.
        startup_s: process start to the first progress line, in seconds.
        peak_memory_bytes: the largest of any process.
        comparable: False where several devices are one piece of hardware.
        warm: of how many processes the compiler's cache was warm, and of how many that is known.
    """

    unit: str
    throughput: Sample | None
    values: tuple[float, ...]
    step_s: Sample | None
    startup_s: Sample | None
    peak_memory_bytes: int | None
    comparable: bool
    warm: tuple[int, int]


def summarise(values: Iterable[float]) -> Sample | None:
    """Median and spread of one value per process; None when there is none. Values that are not finite are left out."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return None
    n = len(ordered)
    rank = _rank(n)
    if rank:
        return Sample(statistics.median(ordered), ordered[rank - 1], ordered[n - rank], n, "interval")
    return Sample(statistics.median(ordered), ordered[0], ordered[-1], n, "range" if n > 1 else "single")


@cache
def _rank(n: int) -> int:
    """The order statistic that bounds the median from below with 95 % confidence; 0 when n is too small.

    The number of values below the median is binomial(n, 1/2) whatever the distribution (Conover, Practical
    Nonparametric Statistics, 3.2).
    """
    from scipy.stats import binom  # here, since it takes a second that most uses of this module need not wait

    return int(binom.ppf((1 - CONFIDENCE) / 2, n, 0.5)) if n > 5 else 0


def measured(verdict: CellVerdict) -> list[AttemptRecord]:
    """The measurement attempts that count: of the source that runs, with its newest key, that passed."""
    deciding = verdict.attempt
    if deciding is None or deciding.outcome != "pass" or not verdict.executed:
        return []
    return [
        attempt
        for attempt in verdict.current
        if attempt.phase == "measurement" and attempt.outcome == "pass" and attempt.source == deciding.source
    ]


def speed(verdict: CellVerdict) -> Speed | None:
    """The speed of a cell; None when it was not measured."""
    attempts = measured(verdict)
    if not attempts:
        return None
    rates = [each.metrics.throughput for each in attempts if each.metrics.throughput]
    unit = rates[-1].unit if rates else ""
    values = tuple(rate.median for rate in rates if rate.unit == unit and math.isfinite(rate.median))
    warm = [warm for attempt in attempts if (warm := attempt.environment.get("warm")) is not None]
    return Speed(
        unit=unit,
        throughput=summarise(values),
        values=values,
        step_s=_over(attempts, "step_s"),
        startup_s=_over(attempts, "startup_s"),
        peak_memory_bytes=max((a.metrics.peak_memory_bytes or 0 for a in attempts), default=0) or None,
        comparable=all(attempt.metrics.comparable for attempt in attempts),
        warm=(sum(warm), len(warm)),
    )


def _over(attempts: Sequence[AttemptRecord], name: Literal["step_s", "startup_s"]) -> Sample | None:
    values = (getattr(attempt.metrics, name) for attempt in attempts)
    return summarise(value for value in values if value is not None)
