"""The section "Required changes" of the page, as plain data for its template."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Literal

from markupsafe import Markup

from matrix.changes.apis import CATEGORIES
from reports.html import charts
from reports.merge import Evidence, Row
from reports.portability import Point, Portability, portability, problem_of
from reports.required import Difference, Line, Mark, bars, differences, required, side_by_side
from reports.steps import Step, steps

MOST = 60
"""Lines of each table, ports and cascade plots in the page; what is left out is said there."""
MOST_LINES = 1500
"""Lines of a side-by-side view."""
ORDER: tuple[Literal["required", "performance", "idle", "unproven"], ...] = (
    "required",
    "performance",
    "idle",
    "unproven",
)
NOTHING_MEASURED = "no platform was comparably measured"
CONTEXT = 3
"""Equal lines shown above and below a hunk; longer stretches are folded to one line."""


@dataclass(frozen=True)
class Bar:
    """The changed lines of a category: how many, and as a share of the most, for the eye."""

    lines: int
    share: float


@dataclass(frozen=True)
class Folded:
    """A stretch of equal lines that is not shown."""

    count: int
    kind: Literal["folded"] = "folded"


@dataclass(frozen=True)
class Heading:
    """The line above a hunk: what it is for, and whether the cells that were proven need it."""

    hunk: int
    categories: str
    marks: list[Mark]
    kind: Literal["heading"] = "heading"


@dataclass(frozen=True)
class View:
    """A port beside its baseline."""

    difference: Difference
    lines: list[Line | Folded | Heading]
    left_out: int

    @property
    def verdicts(self) -> str:
        """`5 required, 1 idle`: of each hunk the first that applies of required, performance, idle, unproven."""
        hunks = self.difference.marks().values()
        best = Counter(min((mark.verdict for mark in marks), key=ORDER.index) for marks in hunks)
        return ", ".join(f"{best[verdict]} {verdict}" for verdict in ORDER if best[verdict])


@dataclass(frozen=True)
class Portable:
    """An application's portability, over the platforms that were measured and over all that are planned.

    Attributes:
        mark: its letter in the drawings; empty where it has no point.
        measured: over the platforms on which at least one application's speed is known and comparable.
        why: what leaves PP over the measured platforms undefined; empty where it is defined.
        planned: over every platform that the plan has for the problem.
        planned_why: the same for these.
    """

    mark: str
    measured: Portability
    why: str
    planned: Portability
    planned_why: str


@dataclass(frozen=True)
class Section:
    """What the template draws.

    Attributes:
        categories: those that occur, in the order of the table of API names.
        bars: by backend and target, for each of these categories.
        unknown: ported cells that the bars leave out, since the texts of their scripts are not known.
        backends: columns of `steps`.
        cascades: by problem, a drawing.
    """

    categories: list[str]
    bars: list[tuple[str, str, int, list[Bar]]]
    unknown: int
    backends: list[str]
    steps: list[Step]
    views: list[View]
    portable: list[Portable]
    navigation: Markup
    cascades: list[tuple[str, Markup]]
    left_out: dict[Literal["bars", "steps", "views", "portable"], int]

    @property
    def empty(self) -> bool:
        return not (self.bars or self.steps or self.views)


def section(evidence: Evidence, found: Sequence[Portability]) -> Section:
    """Everything of the section.

    Args:
        found: the portability of every application over all planned platforms.
    """
    ported = required(evidence)
    counted = bars(ported)
    present = [name for name in CATEGORIES if any(counts[name] for counts in counted.values())]
    most = max((counts[name] for counts in counted.values() for name in present), default=1)
    made_steps, ports = steps(evidence), differences(evidence)
    made = portable(evidence, found)
    problems = list(dict.fromkeys(each.measured.problem for each in made))
    drawn = [(problem, svg) for problem in problems if (svg := _cascade(made, problem))]
    return Section(
        categories=present,
        bars=[
            (backend, target, counts.total(), [Bar(counts[name], 100 * counts[name] / most) for name in present])
            for (backend, target), counts in list(counted.items())[:MOST]
        ],
        unknown=sum(each.state == "ported" and each.by_category is None for each in ported),
        backends=list(dict.fromkeys(backend for step in made_steps for backend in step.by_backend)),
        steps=made_steps[:MOST],
        views=[_view(each) for each in ports[:MOST]],
        portable=made[:MOST],
        navigation=_navigation(made[:MOST]),
        cascades=drawn,
        left_out={
            "bars": max(0, len(counted) - MOST),
            "steps": max(0, len(made_steps) - MOST),
            "views": max(0, len(ports) - MOST),
            "portable": max(0, len(found) - MOST),
        },
    )


# --- a port beside its baseline ---


def _view(difference: Difference) -> View:
    lines = side_by_side(difference.compared.comparison)
    headings = {each.hunk.id: ", ".join(each.categories) for each in difference.compared.hunks}
    marks = difference.marks()
    shown: list[Line | Folded | Heading] = []
    for hunk, stretch in _stretches(lines):
        if hunk is None:
            shown += _folded(stretch, first=not shown, last=stretch[-1] is lines[-1])
        else:
            shown += [Heading(hunk, headings.get(hunk, ""), marks.get(hunk, [])), *stretch]
    return View(difference, shown[:MOST_LINES], max(0, len(shown) - MOST_LINES))


def _stretches(lines: Iterable[Line]) -> Iterator[tuple[int | None, list[Line]]]:
    stretch: list[Line] = []
    for line in lines:
        if stretch and line.hunk != stretch[0].hunk:
            yield stretch[0].hunk, stretch
            stretch = []
        stretch.append(line)
    if stretch:
        yield stretch[0].hunk, stretch


def _folded(stretch: list[Line], first: bool, last: bool) -> list[Line | Folded | Heading]:
    head, tail = 0 if first else CONTEXT, 0 if last else CONTEXT
    count = len(stretch) - head - tail
    if count < 2:
        return list(stretch)
    return [*stretch[:head], Folded(count), *stretch[len(stretch) - tail :]]


# --- portability ---


def portable(evidence: Evidence, found: Sequence[Portability]) -> list[Portable]:
    """The first applications over the platforms that were measured, in the order of the problems."""
    result: list[Portable] = []
    rows: dict[str, list[Row]] = {}
    for row in evidence.rows:
        rows.setdefault(problem_of(row), []).append(row)
    for problem, group in itertools.groupby(found, key=lambda each: each.problem):
        if len(result) >= MOST:
            break
        mine = list(group)
        platforms = dict.fromkeys(p.platform for each in mine for p in each.points if p.efficiency)
        alone = replace(evidence, rows=tuple(rows[problem]))
        known = {each.application: each for each in portability(alone, tuple(platforms))}
        for each in mine:
            measured = known[each.application]
            drawn = measured.pp is not None and measured.convergence is not None
            mark = letters(sum(bool(other.mark) for other in result)) if drawn else ""
            result.append(Portable(mark, measured, _why(measured), each, _why(each)))
    return result


def letters(number: int) -> str:
    """`A` to `Z`, then `AA`: names of points, which are safe in a drawing."""
    before, last = divmod(number, 26)
    return (letters(before - 1) if before else "") + ascii_uppercase[last]


def _why(each: Portability) -> str:
    """What leaves PP undefined."""
    if each.pp is not None:
        return ""
    unknown = [point for point in each.points if point.efficiency is None]
    unproven = [point.platform for point in unknown if point.state == "unproven"]
    unmeasured = [point.platform for point in unknown if point.state != "unproven"]
    parts = [f"{', '.join(unproven)} unproven"] * bool(unproven)
    parts += [f"{', '.join(unmeasured)} not comparably measured"] * bool(unmeasured)
    return "; ".join(parts) or NOTHING_MEASURED


def unknown_convergence(each: Portability) -> str:
    """What leaves convergence undefined."""
    if not each.points:
        return NOTHING_MEASURED
    passed = any(point.source for point in each.points)
    return "a script's text is not known" if passed else "it passed on none"


def efficiency(point: Point) -> str:
    """An application's efficiency on a platform in words: `83 %`, `fails`, `unproven`."""
    if point.state == "failed":
        return "fails"
    if point.efficiency is None:
        return "unproven" if point.state == "unproven" else "not comparably measured"
    return f"{100 * point.efficiency:.0f} %"


def _navigation(made: Iterable[Portable]) -> Markup:
    points = [
        (each.mark, each.measured.convergence, each.measured.pp)
        for each in made
        if each.mark and each.measured.convergence is not None and each.measured.pp is not None
    ]
    return Markup(charts.navigation(points)) if points else Markup("")


def _cascade(made: Iterable[Portable], problem: str) -> Markup:
    curves = []
    for each in made:
        if each.measured.problem == problem and each.mark:
            known = [(high, pp) for _, high, pp in each.measured.cascade if high is not None and pp is not None]
            curves.append((each.mark, known))
    return Markup(charts.cascade(curves)) if curves else Markup("")
