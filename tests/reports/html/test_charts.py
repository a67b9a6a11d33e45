"""The drawings are well-formed whatever the numbers, and say in words what they show."""

import math
import xml.etree.ElementTree as ET

import pytest

from reports.html import charts
from reports.metrics import summarise

REFERENCE = [(1, 4.0), (2, 3.0), (3, 2.0)]


def label(drawing: str) -> str:
    return ET.fromstring(drawing).get("aria-label", "")


def test_the_deviation_is_relative_to_the_reference_at_steps_that_both_have() -> None:
    found = charts.deviations([(1, 4.0), (2, 3.3), (4, 1.0)], REFERENCE)
    assert found == [(1, 0.0), (2, pytest.approx(0.1))]


def test_the_loss_is_drawn_over_its_reference_with_the_band_of_its_tolerance() -> None:
    drawing = charts.loss([(1, 4.0), (2, 3.1)], REFERENCE, 1e-2)
    assert label(drawing) == "loss from 4 to 3.1, the dashed line is the reference"
    classes = [path.get("class") for path in ET.fromstring(drawing).iter("path")]
    assert classes.count("band") == 1
    assert classes.index("band") < classes.index("reference") < classes.index("dot")


def test_many_steps_are_a_line_and_few_are_dots_that_nothing_joins() -> None:
    many = [(step, 4.0 - step / 100) for step in range(100)]
    assert 'class="line"' in charts.loss(many, [], None)
    assert 'class="line"' not in charts.loss(many[::10], [], None)


def test_steps_outside_the_tolerance_are_crosses_and_counted() -> None:
    drawing = charts.deviation([(1, 4.0), (2, 3.3), (3, 2.0001)], REFERENCE, 1e-2)
    assert label(drawing) == "largest relative deviation 0.1, tolerance 1e-02, 1 steps outside"


@pytest.mark.parametrize(
    "points",
    [
        [(1, math.nan), (2, math.inf), (3, -math.inf)],
        [(1, 4.0), (2, math.nan)],
        [(1, 0.0)],
        [(1, 1e308), (2, -1e308)],
        [(5, 4.0), (5, 4.0)],
        [(n, 1e-300) for n in range(5000)],
        [],
    ],
)
@pytest.mark.parametrize("reference", [REFERENCE, [], [(1, 0.0), (2, 0.0)], [(1, math.nan), (2, 1.0)]])
@pytest.mark.parametrize("tolerance", [None, 1e-5, 0.0])
def test_any_numbers_give_a_drawing_or_none(
    points: list[tuple[int, float]], reference: list[tuple[int, float]], tolerance: float | None
) -> None:
    for draw in (charts.loss, charts.deviation):
        drawing = draw(points, reference, tolerance)
        if drawing:
            assert ET.fromstring(drawing).tag == "svg"
            assert "nan" not in drawing.partition("aria-label")[2].partition(">")[2]
            assert len(drawing) < 20_000


def test_each_process_is_a_dot_on_the_drawing_of_throughput() -> None:
    values = [100.0, 110.0, 105.0]
    sample = summarise(values)
    assert sample is not None
    drawing = charts.processes(values, sample)
    assert label(drawing) == "throughput of 3 processes, median 105"
    dots = [path.get("d", "") for path in ET.fromstring(drawing).iter("path") if path.get("class") == "dot"]
    assert dots[0].count("M") == 3


def places(drawing: str, kind: str) -> list[str | None]:
    return [path.get("d") for path in ET.fromstring(drawing).iter("path") if path.get("class") == kind]


def test_a_navigation_chart_has_convergence_across_and_portability_up() -> None:
    # The lower left corner is at (66, 248), the upper right one at (428, 26): see `_plot`.
    drawing = charts.navigation([("A", 0.0, 0.0), ("B", 1.0, 1.0), ("C", 0.5, 0.5), ("D", 0.5, 0.52)])
    assert places(drawing, "dot") == ["M66.0 248.0h0", "M428.0 26.0h0", "M247.0 137.0h0", "M247.0 132.6h0"]
    marks = [text.text for text in ET.fromstring(drawing).iter("text") if text.get("class") == "mark"]
    assert marks == ["A", "B", "C, D"]


def test_a_cascade_shows_efficiency_as_a_line_and_portability_so_far_dashed() -> None:
    # Efficiencies 1 and 1/3: PP is 1, then 2 / (1 + 3). Two platforms lie at a quarter and three quarters.
    drawing = charts.cascade([("A", [(1.0, 1.0), (1 / 3, 0.5)])])
    assert places(drawing, "line") == ["M156.5 26.0L337.5 174.0"]
    assert places(drawing, "reference") == ["M156.5 26.0L337.5 137.0"]
    assert label(drawing) == "efficiency on up to 2 platforms of 1 backends"
