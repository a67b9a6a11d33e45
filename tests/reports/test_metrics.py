"""The process is the sample: medians over processes, with an interval where there are enough of them."""

import pytest

from matrix.journal import AttemptRecord
from matrix.judge import judge_cell
from reports.metrics import Sample, Speed, speed, summarise

from .records import DAY, attempt, failure, planned, processes

CELL = planned("gpt", "torch", "cpu", "single")


def measured(*attempts: AttemptRecord) -> Speed | None:
    return speed(judge_cell(CELL, [attempt(CELL), *attempts], DAY))


@pytest.mark.parametrize(
    ("values", "sample"),
    [
        ([3.0], Sample(3.0, 3.0, 3.0, 1, "single")),
        ([1.0, 2.0, 9.0], Sample(2.0, 1.0, 9.0, 3, "range")),
        # binomial(6, 1/2): one value below the median or none has probability 7/64, none 1/64 < 2.5 %
        ([6.0, 1.0, 5.0, 2.0, 4.0, 3.0], Sample(3.5, 1.0, 6.0, 6, "interval")),
        # binomial(9, 1/2): P(X <= 1) = 10/512 = 1.95 %, P(X <= 2) = 9 %: second smallest to second largest
        ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], Sample(5.0, 2.0, 8.0, 9, "interval")),
    ],
)
def test_the_spread_is_an_interval_from_six_processes_on(values: list[float], sample: Sample) -> None:
    assert summarise(values) == sample


def test_values_that_are_not_finite_are_left_out() -> None:
    assert summarise([float("nan"), 2.0, float("inf")]) == Sample(2.0, 2.0, 2.0, 1, "single")
    assert summarise([float("nan")]) is None


def test_the_median_is_over_processes() -> None:
    found = measured(*processes(CELL, [100.0, 300.0, 110.0]))
    assert found is not None
    assert found.throughput == Sample(110.0, 100.0, 300.0, 3, "range")
    assert found.unit == "tokens/s"
    assert found.startup_s is not None
    assert found.startup_s.median == 3.1
    assert found.peak_memory_bytes == 734 * 2**20
    assert found.warm[0] == found.warm[1] > 0


def test_a_cell_without_measurement_has_no_speed() -> None:
    assert measured() is None


def test_a_process_without_enough_intervals_counts_for_memory_but_not_for_throughput() -> None:
    found = measured(attempt(CELL, phase="measurement"))
    assert found is not None
    assert found.throughput is None
    assert found.peak_memory_bytes == 734 * 2**20


def test_attempts_of_an_earlier_version_do_not_count() -> None:
    old = processes(CELL, [10.0], key="old")
    found = measured(*old, *processes(CELL, [100.0]))
    assert found is not None
    assert found.values == (100.0,)


def test_a_broken_cell_has_no_speed() -> None:
    broken = attempt(CELL, "fail", failure=failure("hang", "slow"))
    assert speed(judge_cell(CELL, [broken, *processes(CELL, [100.0])], DAY)) is None


def test_one_incomparable_process_makes_the_cell_incomparable() -> None:
    found = measured(*processes(CELL, [100.0]), *processes(CELL, [100.0], comparable=False))
    assert found is not None
    assert not found.comparable
