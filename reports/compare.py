"""Two sets of journals, cell by cell: newly broken, fixed, slower, faster, lost."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from reports import words
from reports.merge import Evidence, Row, load
from reports.overview import failed_attempt
from reports.text import count, one_line
from reports.units import number

ALPHA = 0.05
"""A difference counts when chance alone would show one as large in fewer than 5 of 100 comparisons,"""
EFFECT = 0.05
"""and when the medians are at least 5 % apart: less is seldom worth a person's time."""

Kind = Literal["newly broken", "slower", "lost", "fixed", "faster", "other cause", "new", "unclear"]

EXIT_SAME: Final = 0
EXIT_WORSE: Final = 1
WORSE: Final = ("newly broken", "slower", "lost")

TESTED: Final = "tested"

_ORDER: Final[dict[Kind, str]] = {
    "newly broken": "ran before, does not now (or only after a port)",
    "slower": "significantly lower throughput",
    "lost": "was executed, now not",
    "fixed": "did not run before, does now (or now without a port)",
    "faster": "significantly higher throughput",
    "other cause": "broken before and now, for another cause",
    "new": "executed now, not before",
    "unclear": "throughput that looks different, without enough processes to tell",
}


@dataclass(frozen=True)
class Change:
    """What became of a cell.

    Attributes:
        kind: the group that it belongs to.
        cell: its id.
        machine: where the head was executed (the base, for a lost cell).
        words: from what to what, in a line.
        ratio: head over base throughput, where that is what changed.
        p: the probability of such a difference by chance (two-sided Mann-Whitney U over processes).
    """

    kind: Kind
    cell: str
    machine: str
    words: str
    ratio: float | None = None
    p: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The changes from a base to a head, worst first.

    Attributes:
        changes: in the order of `Kind`.
        same: how many cells were executed in both and did not change.
        tested: how many cells had enough processes on one machine for their speed to be compared.
        untested: cells that were measured in both, and why their speed was not compared, counted by reason.
        outside: how many executed cells of the base the head's plan leaves out by selection.
    """

    changes: tuple[Change, ...]
    same: int
    tested: int
    untested: dict[str, int]
    outside: int = 0

    @property
    def exit_code(self) -> int:
        """1 when a cell is newly broken, slower or lost, else 0."""
        return EXIT_WORSE if any(change.kind in WORSE for change in self.changes) else EXIT_SAME

    def of(self, kind: Kind) -> list[Change]:
        return [change for change in self.changes if change.kind == kind]

    def __str__(self) -> str:
        lines = []
        for kind, meaning in _ORDER.items():
            changes = self.of(kind)
            if changes:
                lines.append(f"{kind} ({len(changes):,}): {meaning}")
                lines += [f"  {one_line(c.cell)}  {c.words}" for c in changes]
                lines.append("")
        if not self.changes:
            lines += ["No cell changed.", ""]
        lines.append(f"{count(self.same, 'executed cell')} unchanged; speed compared in {count(self.tested, 'cell')}.")
        lines += [f"Speed not compared in {count(n, 'cell')}: {reason}." for reason, n in self.untested.items()]
        if self.tested >= 20:
            chance = round(self.tested * ALPHA)
            lines.append(f"Of {self.tested:,} comparisons, up to {chance:,} may be called different by chance alone.")
        if self.outside:
            left = count(self.outside, "executed cell")
            lines.append(f"{left} of the base {'is' if self.outside == 1 else 'are'} not in the head's selection.")
        return "\n".join(lines)


def compare(base_paths: Iterable[Path], head_paths: Iterable[Path], today: datetime.date | None = None) -> Comparison:
    """Compare the journals at or below two sets of paths.

    Args:
        base_paths: what was before: journals, run folders, or folders of runs.
        head_paths: what is now.
        today: the day against which expectations expire; the current one when left out.

    Raises:
        UsageError: there is no readable journal on a side.
    """
    return compare_evidence(load(base_paths, today), load(head_paths, today))


def compare_evidence(base: Evidence, head: Evidence) -> Comparison:
    """Compare two merged sets (see `compare`). Rows of one machine are compared; else the best of each side."""
    changes: list[Change] = []
    untested: dict[str, int] = {}
    same = tested = outside = 0
    before, after = _by_cell(base), _by_cell(head)
    selected = any(journal.run.selection for journal in head.journals)
    for cell, rows in before.items():
        if cell not in after and selected:
            outside += any(map(_proven, rows))
    for cell in dict.fromkeys([*after, *before]):
        if cell not in after and selected:
            continue
        for old, new in _pairs(before.get(cell, []), after.get(cell, [])):
            found = _verdicts(old, new)
            if found is None and old is not None and new is not None:
                found, reason = _speeds(old, new)
                tested += reason == TESTED
                if reason not in (TESTED, None):
                    untested[reason] = untested.get(reason, 0) + 1
            if found is not None:
                changes.append(found)
            elif new is not None and _proven(new):
                same += 1
    order = list(_ORDER)
    changes.sort(key=lambda change: order.index(change.kind))
    return Comparison(tuple(changes), same, tested, dict(sorted(untested.items())), outside)


def _by_cell(evidence: Evidence) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for row in evidence.rows:
        rows.setdefault(row.cell, []).append(row)
    return rows


def _pairs(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[Row | None, Row | None]]:
    """The rows of a cell, those of one machine together; what is left over is paired best with best."""
    old, new = {row.machine: row for row in before}, {row.machine: row for row in after}
    shared = [machine for machine in new if machine in old]
    if shared:
        return [(old[machine], new[machine]) for machine in shared]
    return [(max(before, key=_rank, default=None), max(after, key=_rank, default=None))]


def _proven(row: Row) -> bool:
    """Whether it was executed to a result that says something, good or bad."""
    return row.verdict.executed and _rank(row) > 0


def _rank(row: Row) -> int:
    """How well a cell stands: not proven 0, broken 1, ported 2, as is 3."""
    return {"as-is": 3, "ported": 2, "broken": 1}.get(row.verdict.verdict, 0)


def _state(row: Row) -> str:
    verdict = row.verdict
    word = words.VERDICTS[verdict.verdict].label
    detail = words.short(verdict)
    return one_line(word if detail == word else f"{word} ({detail})", 80)


def _verdicts(old: Row | None, new: Row | None) -> Change | None:
    """The change of a cell's verdict; None when it stands as before."""
    was = old is not None and _proven(old)
    now = new is not None and _proven(new)
    if old is not None and was and not now:
        to = f"{_state(new)}: {one_line(new.verdict.why, 120)}" if new is not None else "no longer planned"
        return Change("lost", old.cell, old.machine, f"{_state(old)} -> {to}")
    if new is None or not now:
        return None
    if old is None or not was:
        return Change("new", new.cell, new.machine, f"{_state(old) if old else 'not planned'} -> {_state(new)}")
    arrow = f"{_state(old)} -> {_state(new)}"
    if _rank(new) < _rank(old):
        return Change("newly broken", new.cell, new.machine, f"{arrow}: {one_line(_reason(new), 160)}")
    if _rank(new) > _rank(old):
        return Change("fixed", new.cell, new.machine, arrow)
    if new.verdict.verdict == "broken" and old.verdict.cause != new.verdict.cause:
        return Change("other cause", new.cell, new.machine, arrow)
    return None


def _reason(row: Row) -> str:
    attempt = failed_attempt(row.verdict)
    return attempt.failure.message if attempt and attempt.failure else row.verdict.why


def _speeds(old: Row, new: Row) -> tuple[Change | None, str | None]:
    """A change of speed; and why there was no comparison, `TESTED` when there was one, None without any figures."""
    before, after = old.speed, new.speed
    if before is None or after is None or not before.throughput or not after.throughput:
        return None, "measured on one side only" if before or after else None
    if old.machine != new.machine:
        return None, "other machine"
    if before.unit != after.unit:
        return None, "other unit"
    if not before.comparable or not after.comparable:
        return None, "not comparable on this hardware"
    ratio = after.throughput.median / before.throughput.median
    sizes = f"n = {len(before.values)} and {len(after.values)}"
    medians = f"{number(before.throughput.median)} -> {number(after.throughput.median)} {one_line(after.unit, 30)}"
    text = f"{medians} ({100 * (ratio - 1):+.1f} %, {sizes}"
    apart = abs(math.log(ratio)) >= math.log1p(EFFECT) if ratio > 0 else True
    if smallest_p(len(before.values), len(after.values)) >= ALPHA:
        reason = "too few processes"
        if not apart:
            return None, reason
        return Change("unclear", new.cell, new.machine, f"{text}): too few processes to tell", ratio), reason
    p = mann_whitney(before.values, after.values)
    if not apart or p >= ALPHA:
        return None, TESTED
    kind: Kind = "slower" if ratio < 1 else "faster"
    return Change(kind, new.cell, new.machine, f"{text}, p = {p:.2g})", ratio, p), TESTED


def smallest_p(n: int, m: int) -> float:
    """The smallest p that a two-sided Mann-Whitney U test of n against m values can give: 2 / C(n + m, n)."""
    return min(1.0, 2 / math.comb(n + m, n))


def mann_whitney(before: Sequence[float], after: Sequence[float]) -> float:
    """The two-sided p of the Mann-Whitney U test; exact without ties, else by the normal approximation."""
    from scipy.stats import mannwhitneyu  # here, since it takes a second that most uses of this module need not wait

    return float(mannwhitneyu(before, after, alternative="two-sided", method="auto").pvalue)
