"""Metrics of performance portability and code divergence, as the field defines them, from rows of evidence.

An *application* is a backend with its scripts (`jax`, `torch`), a *problem* a workload (with the values of further
axes), a *platform* an accelerator with a layout (`cuda/dp2`).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from matrix.changes import differences, script
from matrix.errors import UsageError
from reports.merge import Evidence, Row

MAIN_AXES = ("workload", "backend", "accelerator", "layout")

State = Literal["passed", "failed", "unproven"]


# --- the formulas ---


def application_efficiency(foms: Mapping[str, float | None]) -> dict[str, float | None]:
    """Each application's performance over the best one's, on one platform, for one problem.

    e_i(a, p) = fom(a) / max over b of fom(b), with a figure of merit of which more is better (a throughput);
    S. J. Pennycook, J. D. Sewall, V. W. Lee, "A Metric for Performance Portability", arXiv 1611.07409, section 3.

    Args:
        foms: by application; 0 for one that does not run there, None where it is not known.
    """
    best = max((fom for fom in foms.values() if fom is not None), default=0.0)
    return {name: None if fom is None else fom / best if best else 0.0 for name, fom in foms.items()}


def performance_portability(efficiencies: Sequence[float | None]) -> float | None:
    """PP: the harmonic mean of an application's efficiencies over a set of platforms.

    PP(a, p, H) = |H| / sum over i in H of 1 / e_i(a, p) if the application runs on every platform of H, else 0
    (arXiv 1611.07409, equation 1).

    Args:
        efficiencies: one for each platform of H: from 0 to 1, 0 where it does not run, None where nobody knows.

    Returns:
        None, for "undefined", when one is not known, unless another is 0, which settles it; and when H is empty.
    """
    known = [each for each in efficiencies if each is not None]
    if any(each <= 0 for each in known):
        return 0.0
    if not known or len(known) < len(efficiencies):
        return None
    return len(known) / sum(1 / each for each in known)


def distance(one: AbstractSet[object], other: AbstractSet[object]) -> float:
    """Jaccard distance: 1 - |A and B| / |A or B|; 0 for two empty sets."""
    union = len(one | other)
    return 1 - len(one & other) / union if union else 0.0


def divergence(lines: Sequence[AbstractSet[object]]) -> float:
    """CD: the mean distance of the source lines used on each pair of platforms.

    CD(a, p, H) = (|H| choose 2)^-1 * sum over pairs {i, j} of H of d_ij, with the Jaccard distance d_ij of the lines
    that platforms i and j use; S. L. Harrell et al., "Effective Performance Portability", P3HPC 2018,
    doi 10.1109/P3HPC.2018.00006, section III. 0: all code is shared; 1: none is.

    Args:
        lines: for each platform, identities of the lines used there.

    Returns:
        0 for a single platform, as Intel's p3 analysis library has it: nothing differs.
    """
    pairs = list(itertools.combinations(lines, 2))
    return sum(distance(one, other) for one, other in pairs) / len(pairs) if pairs else 0.0


def convergence(lines: Sequence[AbstractSet[object]]) -> float:
    """1 - CD, the horizontal axis of a navigation chart: 1 when all platforms use the same lines."""
    return 1 - divergence(lines)


# --- which lines are whose ---


@dataclass(frozen=True)
class Weave:
    """Several sources as one, in which lines that they share stand once: as if the ports were branches in the baseline.

    Attributes:
        lines: code, one line for each statement, without comments.
        used: by source, the numbers of its lines, from 1.
    """

    lines: tuple[str, ...]
    used: Mapping[str, frozenset[int]]

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    @property
    def id(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()


def weave(sources: Mapping[str, str]) -> Weave:
    """Lay sources over each other, the first one first; each is aligned with what is there already.

    Args:
        sources: texts by name; of one that does not parse, the lines as they are written.
    """
    whole: list[tuple[tuple[int, str], set[str]]] = []
    for name, text in sources.items():
        mine = _code(text)
        result: list[tuple[tuple[int, str], set[str]]] = []
        done = 0
        for a1, a2, b1, b2 in [*differences([line for line, _ in whole], mine), (len(whole), 0, 0, 0)]:
            for line, users in whole[done:a1]:
                result.append((line, users | {name}))
            result += whole[a1:a2]
            result += [(line, {name}) for line in mine[b1:b2]]
            done = a2
        whole = result
    lines = tuple("    " * depth + text.replace("\n", "\\n") for (depth, text), _ in whole)
    used = {name: frozenset(number for number, (_, users) in enumerate(whole, 1) if name in users) for name in sources}
    return Weave(lines, used)


def _code(text: str) -> list[tuple[int, str]]:
    try:
        return [unit.same for unit in script.parse(text).units]
    except UsageError:
        return [(0, line.rstrip()) for line in text.splitlines() if line.strip()]


# --- from evidence ---


@dataclass(frozen=True)
class Point:
    """An application on a platform, for one problem.

    Attributes:
        state: `passed`, `failed` (broken or refused), or `unproven` (nobody looked, or the tool could not).
        fom: the median throughput of its processes; 0 when it failed; None when it was not measured, or its devices
            are one piece of hardware, so that it cannot be compared.
        efficiency: its application efficiency.
        source: the source that passed there.
    """

    problem: str
    application: str
    platform: str
    state: State
    fom: float | None
    efficiency: float | None
    source: str | None


@dataclass(frozen=True)
class Portability:
    """An application over a stated set of platforms, for one problem.

    Attributes:
        platforms: the set H.
        points: on each platform of H.
        pp: performance portability over H; None while any of it is unproven or not measured.
        divergence: CD over those platforms of H on which it passed; None when there is none, or a source is not known.
        weave: the sources that passed, laid over each other.
    """

    problem: str
    application: str
    platforms: tuple[str, ...]
    points: tuple[Point, ...]
    pp: float | None
    divergence: float | None
    weave: Weave

    @property
    def convergence(self) -> float | None:
        return None if self.divergence is None else 1 - self.divergence

    @property
    def coverage_key(self) -> str:
        """Names the weave in exports; with a point's source, the lines that it uses."""
        return self.weave.id

    def lines(self, point: Point) -> frozenset[int]:
        """The lines of the weave that are used on a platform."""
        return self.weave.used.get(point.source or "", frozenset())

    @property
    def cascade(self) -> list[tuple[str, float | None, float | None]]:
        """Platforms by falling efficiency, each with it and with PP over the platforms so far: a cascade plot.

        J. Sewall et al., "Interpreting and Visualizing Performance Portability Metrics", P3HPC 2020,
        doi 10.1109/P3HPC51967.2020.00007. Platforms of which nothing is known come last, with None.
        """
        ordered = sorted(self.points, key=lambda p: (p.efficiency is None, -(p.efficiency or 0.0), p.platform))
        found = []
        for count, point in enumerate(ordered, 1):
            so_far = performance_portability([each.efficiency for each in ordered[:count]])
            found.append((point.platform, point.efficiency, so_far))
        return found


def portability(evidence: Evidence, platforms: Sequence[str] | None = None) -> list[Portability]:
    """Every application's portability, for every problem.

    Args:
        evidence: the rows.
        platforms: the set H, as `accelerator/layout`; left out, every platform that the problem is planned for.
    """
    problems: dict[str, list[Row]] = {}
    for row in evidence.rows:
        problems.setdefault(problem_of(row), []).append(row)
    found = []
    for problem, rows in problems.items():
        points = _points(problem, rows)
        chosen = tuple(platforms) if platforms is not None else tuple(dict.fromkeys(p.platform for p in points))
        for application in dict.fromkeys(point.application for point in points):
            mine = {point.platform: point for point in points if point.application == application}
            there = [mine.get(each) or _nothing(problem, application, each) for each in chosen]
            sources = _sources([row for row in rows if row.axes.get("backend") == application])
            used = dict.fromkeys(point.source for point in there if point.source)
            whole = weave({name: text for name, text in sources.items() if name in used})
            passed = [whole.used.get(point.source) for point in there if point.source]
            lines = [each for each in passed if each is not None]
            found.append(
                Portability(
                    problem=problem,
                    application=application,
                    platforms=chosen,
                    points=tuple(there),
                    pp=performance_portability([point.efficiency for point in there]),
                    divergence=divergence(lines) if lines and len(lines) == len(passed) else None,
                    weave=whole,
                )
            )
    return found


def _points(problem: str, rows: Sequence[Row]) -> list[Point]:
    machines = Counter(row.cell for row in rows)
    names = [_platform(row, machines[row.cell]) for row in rows]
    foms: dict[str, dict[str, float | None]] = {}
    for row, platform in zip(rows, names, strict=True):
        foms.setdefault(platform, {})[row.axes.get("backend", "")] = _fom(row)
    points = []
    for row, platform in zip(rows, names, strict=True):
        application = row.axes.get("backend", "")
        state, attempt = _state(row), row.verdict.attempt
        points.append(
            Point(
                problem=problem,
                application=application,
                platform=platform,
                state=state,
                fom=foms[platform][application],
                efficiency=application_efficiency(foms[platform])[application],
                source=attempt.source if attempt and state == "passed" else None,
            )
        )
    return points


def _nothing(problem: str, application: str, platform: str) -> Point:
    return Point(problem, application, platform, "unproven", None, None, None)


def problem_of(row: Row) -> str:
    """A workload, with the values of further axes: `digits`, `digits/dtype=bfloat16`."""
    further = [f"{name}={value}" for name, value in sorted(row.axes.items()) if name not in MAIN_AXES]
    return "/".join([row.axes.get("workload", ""), *further])


def _platform(row: Row, machines: int) -> str:
    """`accelerator/layout`, with the machine where several machines executed the same cell."""
    name = f"{row.axes.get('accelerator', '')}/{row.axes.get('layout', '')}"
    return name if machines == 1 else f"{name} on {row.machine}"


def _state(row: Row) -> State:
    verdict = row.verdict.verdict
    if verdict in ("as-is", "ported"):
        return "passed"
    return "failed" if verdict == "broken" else "unproven"  # what was not executed is in no score, refused or not


def _fom(row: Row) -> float | None:
    state = _state(row)
    if state != "passed":
        return 0.0 if state == "failed" else None
    speed = row.speed
    return speed.throughput.median if speed and speed.throughput and speed.comparable else None


def _sources(rows: Sequence[Row]) -> dict[str, str]:
    """The scripts of an application by name, baselines first."""
    roles: dict[str, bool] = {}
    texts: dict[str, str] = {}
    for row in rows:
        for attempt, journal in zip(row.verdict.attempts, row.journals, strict=True):
            text = journal.run.sources.get(f"{row.axes.get('workload', '')}/{attempt.source}")
            if attempt.source and text is not None:
                roles[attempt.source] = attempt.role == "port"
                texts[attempt.source] = text
    return {name: texts[name] for name in sorted(texts, key=lambda name: (roles[name], name))}
