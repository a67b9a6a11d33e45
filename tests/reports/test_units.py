"""Numbers as they are shown."""

import pytest

from reports.units import lines, memory, moment, number, seconds, span


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"), (0.01234, "0.0123"), (4.567, "4.57"), (45.67, "45.7"), (456.7, "457"), (999.6, "1.00 k"),
        (12_345, "12.3 k"), (7_890_000, "7.89 M"), (3.1e9, "3.10 G"), (float("inf"), "inf"), (1e-9, "1.00e-09"),
    ],
)  # fmt: skip
def test_numbers_keep_three_digits(value: float, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0005, "500 µs"), (0.85, "850 ms"), (12.34, "12.3 s"), (119.4, "119 s"), (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
    ],
)  # fmt: skip
def test_times_take_the_unit_that_fits(value: float, shown: str) -> None:
    assert seconds(value) == shown


def test_memory_has_binary_prefixes() -> None:
    assert [memory(512), memory(512 * 2**20), memory(80 * 2**30)] == ["512 B", "512 MiB", "80.0 GiB"]


def test_changed_lines_have_a_plus_and_a_minus_sign() -> None:
    assert lines(6, 1) == "+6 \u22121"


def test_a_span_names_its_day_once() -> None:
    morning, noon, tomorrow = "2026-06-12T08:00:00Z", "2026-06-12T12:00:00Z", "2026-06-13T12:00:00Z"
    assert span(morning, noon) == "12 June 2026, 08:00 to 12:00 UTC"
    assert span(morning, tomorrow) == "12 June 2026, 08:00 UTC to 13 June 2026, 12:00 UTC"
    assert span(noon, noon) == "12 June 2026, 12:00 UTC"
    assert span("then", "now") == "then to now"


def test_a_time_stamp_is_shown_in_utc_and_what_is_none_as_it_is() -> None:
    assert moment("2026-06-12T16:03:00+02:00") == "12 June 2026, 14:03 UTC"
    assert moment("yesterday") == "yesterday"
