"""Drawings as SVG text: loss against its reference, deviation, processes' speed; portability against convergence.

Only numbers and words of this module go into the markup, so it is safe whatever the records hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reports.metrics import Sample
from reports.units import number

WIDTH, HEIGHT = 480, 190
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 26
DOTS = 60  # more of them would touch
POINTS = 160  # more would not be told apart at this width

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class _Axes:
    """Linear maps from data to the drawing."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / ((self.x_high - self.x_low) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / ((self.y_high - self.y_low) or 1)
        return HEIGHT - BOTTOM - min(1.0, max(0.0, share)) * (HEIGHT - TOP - BOTTOM)

    def frame(self, ticks: Sequence[float], show: Callable[[float], str]) -> str:
        bottom = HEIGHT - BOTTOM
        parts = [f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>']
        for tick in ticks:
            y = self.y(tick)
            parts.append(f'<path class="rule" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{show(tick)}</text>')
        for x, anchor in ((math.ceil(self.x_low), "start"), (math.floor(self.x_high), "end")):
            parts.append(f'<text x="{self.x(x):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{x}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
        return "".join(parts)


def _svg(label: str, body: str, height: int = HEIGHT) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">{body}</svg>'


def _thin(points: Points) -> list[tuple[int, float]]:
    """At most `POINTS` of the points: evenly spaced, with the last, and with every point that is not finite."""
    step = math.ceil(len(points) / POINTS)
    last = len(points) - 1
    return [p for i, p in enumerate(points) if i % step == 0 or i == last or not math.isfinite(p[1])][: 4 * POINTS]


def _path(axes: _Axes, points: Points) -> str:
    return "M" + "L".join(f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y in points) if points else ""


def _cross(x: float, y: float) -> str:
    return f"M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8"


def loss(points: Points, reference: Points, tolerance: float | None) -> str:
    """The loss of an attempt over the reference's line, with the band of its tolerance."""
    shown, wanted = _thin(points), _thin([p for p in reference if not points or p[0] <= points[-1][0]])
    finite = [y for _, y in [*shown, *wanted] if math.isfinite(y)]
    steps = [x for x, _ in [*shown, *wanted]]
    if not finite or not steps:
        return ""
    low, high = min(finite), max(finite)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    axes = _Axes(min(steps), max(steps), low - room, high + room)
    body = [axes.frame([low, (low + high) / 2, high], lambda v: f"{v:.3g}")]
    if wanted and tolerance:
        upper = [(x, y + tolerance * abs(y)) for x, y in wanted]
        lower = [(x, y - tolerance * abs(y)) for x, y in reversed(wanted)]
        body.append(f'<path class="band" d="{_path(axes, [*upper, *lower])}Z"/>')
    body.append(f'<path class="reference" d="{_path(axes, wanted)}"/>' if wanted else "")
    good = [(x, y) for x, y in shown if math.isfinite(y)]
    if len(good) > DOTS:
        body.append(f'<path class="line" d="{_path(axes, good)}"/>')
    else:  # a line between steps that are far apart would seem to leave the reference
        body.append(f'<path class="dot" d="{"".join(f"M{axes.x(x):.1f} {axes.y(y):.1f}h0" for x, y in good)}"/>')
    lost = "".join(_cross(axes.x(x), TOP + 6) for x, y in shown if not math.isfinite(y))
    body.append(f'<path class="cross" d="{lost}"/>' if lost else "")
    label = f"loss from {good[0][1]:.4g} to {good[-1][1]:.4g}" if good else "no finite loss"
    return _svg(label + (", the dashed line is the reference" if wanted else ""), "".join(body))


def deviations(points: Points, reference: Points) -> list[tuple[int, float]]:
    """|loss - reference| / |reference| at each step that both have; infinite where the loss is not finite."""
    wanted = dict(reference)
    found = []
    for step, value in points:
        if step in wanted:
            off = abs(value - wanted[step]) / (abs(wanted[step]) or 1.0)
            found.append((step, off if math.isfinite(off) else math.inf))
    return found


def deviation(points: Points, reference: Points, tolerance: float | None) -> str:
    """The relative deviation from the reference on a logarithmic axis; what lies in the band is within tolerance."""
    off = deviations(points, reference)
    positive = [y for _, y in off if 0 < y < math.inf]
    if not off or not (positive or tolerance):
        return ""
    ends = [*positive, *([tolerance] if tolerance else [])]
    low = math.floor(math.log10(max(min(ends), max(ends) * 1e-9)))
    high = math.ceil(math.log10(max(ends) * 1.5))
    inset = (off[-1][0] - off[0][0]) * 0.02 or 0.5
    axes = _Axes(off[0][0] - inset, off[-1][0] + inset, low, max(high, low + 1))
    step = math.ceil((high - low) / 4) or 1
    body = [axes.frame(range(low, high + 1, step), lambda v: f"1e{v:.0f}")]
    if tolerance:
        y = axes.y(math.log10(tolerance))
        band = f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}V{HEIGHT - BOTTOM}H{LEFT}Z"
        body.insert(0, f'<path class="band" d="{band}"/>')
        body.append(f'<path class="reference" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
    good, bad = [], []
    for x, value in _thin(off):
        height = axes.y(math.log10(value)) if 0 < value < math.inf else (TOP + 6 if value else HEIGHT - BOTTOM)
        if tolerance is not None and not value <= tolerance:
            bad.append(_cross(axes.x(x), height))
        else:
            good.append(f"M{axes.x(x):.1f} {height:.1f}h0")
    body.append(f'<path class="dot" d="{"".join(good)}"/>' if good else "")
    body.append(f'<path class="cross" d="{"".join(bad)}"/>' if bad else "")
    worst = max(value for _, value in off)
    words = f"largest relative deviation {worst:.2g}"
    if tolerance:
        words += f", tolerance {tolerance:.0e}, {len(bad)} steps outside"
    return _svg(words, "".join(body))


def processes(values: Sequence[float], sample: Sample) -> str:
    """Each process a dot, the interval or range a bar, the median a line."""
    low, high = min(values), max(values)
    room = (high - low) * 0.15 or abs(high) * 0.05 or 1.0
    low, high = low - room, high + room

    def x(value: float) -> float:
        return 12 + (value - low) / (high - low) * (WIDTH - 24)

    body = [
        f'<path class="axis" d="M12 34H{WIDTH - 12}"/>',
        f'<path class="spread" d="M{x(sample.low):.1f} 22H{x(sample.high):.1f}"/>' if sample.n > 1 else "",
        f'<path class="middle" d="M{x(sample.median):.1f} 8V34"/>',
        f'<path class="dot" d="{"".join(f"M{x(value):.1f} 22h0" for value in values)}"/>',
        f'<text x="12" y="50">{number(low)}</text>',
        f'<text x="{WIDTH - 12}" y="50" text-anchor="end">{number(high)}</text>',
    ]
    return _svg(f"throughput of {len(values)} processes, median {number(sample.median)}", "".join(body), 56)


# --- portability ---

SQUARE = 300  # height of a drawing whose both axes go from 0 to 1
LETTER = 12  # its size; labels that are nearer become one
Labels = list[tuple[float, float, list[str]]]


def _plot(x: float, y: float) -> tuple[float, float]:
    """From 0 to 1 on both axes, with room for marks that lie on the border."""
    return LEFT + 8 + x * (WIDTH - LEFT - 60), SQUARE - BOTTOM - 26 - y * (SQUARE - TOP - BOTTOM - 40)


def _unit_frame(across: str, up: str, ticks: Sequence[tuple[float, str]]) -> str:
    (left, bottom), (right, top) = _plot(0, 0), _plot(1, 1)
    parts = [f'<path class="axis" d="M{left - 8:.1f} {top - 8:.1f}V{bottom + 8:.1f}H{right + 8:.1f}"/>']
    for tick in (0.0, 0.5, 1.0):
        y = _plot(0, tick)[1]
        parts.append(f'<path class="rule" d="M{left - 8:.1f} {y:.1f}H{right + 8:.1f}"/>')
        parts.append(f'<text x="{left - 14:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for x, text in ticks:
        parts.append(f'<text x="{_plot(x, 0)[0]:.1f}" y="{bottom + 24:.1f}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{(left + right) / 2:.1f}" y="{SQUARE - 6}" text-anchor="middle">{across}</text>')
    middle = (top + bottom) / 2
    parts.append(
        f'<text x="14" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 14 {middle:.1f})">{up}</text>'
    )
    return "".join(parts)


def navigation(points: Sequence[tuple[str, float, float]]) -> str:
    """Convergence across, performance portability up; the best place is the upper right corner.

    S. J. Pennycook et al., "Navigating Performance, Portability, and Productivity", Computing in Science and
    Engineering 23 (5), 2021, doi 10.1109/MCSE.2021.3097276.

    Args:
        points: for each a mark of plain letters, convergence and PP, both from 0 to 1; what lies too close to be told
            apart shares a label.
    """
    labels: Labels = []
    body = [_unit_frame("code convergence", "performance portability", [(0, "0"), (0.5, "0.5"), (1, "1")])]
    for mark, convergence, pp in points:
        x, y = _plot(convergence, pp)
        body.append(f'<path class="dot" d="M{x:.1f} {y:.1f}h0"/>')
        _add(labels, mark, x, y)
    body += [_label(*label) for label in labels]
    return _svg(f"{len(points)} points, code convergence across and performance portability up", "".join(body), SQUARE)


def cascade(curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    """Applications' efficiencies on their platforms, best first (line), and PP over the platforms so far (dashed).

    J. Sewall et al., "Interpreting and Visualizing Performance Portability Metrics", P3HPC 2020,
    doi 10.1109/P3HPC51967.2020.00007.

    Args:
        curves: for each a mark of plain letters, and for each platform efficiency and PP, both from 0 to 1.
    """
    most = max(len(points) for _, points in curves)

    def at(index: int) -> float:
        return (index + 0.5) / most

    ticks = [(at(index), str(index + 1)) for index in range(0, most, math.ceil(most / 10))]
    body = [_unit_frame("platforms, best first", "efficiency", ticks)]
    labels: Labels = []
    for mark, points in curves:
        efficiency = [_plot(at(index), value) for index, (value, _) in enumerate(points)]
        so_far = [_plot(at(index), value) for index, (_, value) in enumerate(points)]
        body.append(
            f'<path class="reference" d="{_polyline(so_far)}"/><path class="line" d="{_polyline(efficiency)}"/>'
        )
        body.append(f'<path class="dot" d="{"".join(f"M{x:.1f} {y:.1f}h0" for x, y in efficiency)}"/>')
        _add(labels, mark, *efficiency[-1])
    body += [_label(*label) for label in labels]
    return _svg(f"efficiency on up to {most} platforms of {len(curves)} backends", "".join(body), SQUARE)


def _add(labels: Labels, mark: str, x: float, y: float) -> None:
    """Put a mark at a place, or to the label that is there."""
    for at_x, at_y, marks in labels:
        if abs(at_x - x) < LETTER and abs(at_y - y) < LETTER:
            marks.append(mark)
            return
    labels.append((x, y, [mark]))


def _label(x: float, y: float, marks: Sequence[str]) -> str:
    return f'<text class="mark" x="{x + 7:.1f}" y="{y + 4:.1f}">{", ".join(marks)}</text>'


def _polyline(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
