"""What had to change: for every cell that runs only after a port, or not even then; as rows, Markdown and CSV."""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from matrix import changes
from matrix.changes import Comparison, categories
from matrix.changes.apis import CATEGORIES
from matrix.errors import UsageError
from matrix.journal import HunkProof, ProofRecord
from reports.exports import safe
from reports.markdown import code, plain
from reports.merge import Evidence, Row

MANY = 1000
"""Pairs of sources that are remembered, so that those which many cells share are compared once."""
MOST = 100
"""Cells in the Markdown."""


@dataclass(frozen=True)
class Required:
    """The changes of a cell.

    Attributes:
        cell: its id.
        backend: how its script is executed.
        target: its accelerator and layout, as `cuda/dp2`.
        state: `ported`, or `broken`: then this is the nearest port that was tried, and it failed.
        source: the port; baseline: the script that it is a port of.
        added, deleted, hunks: in lines of code, formatting and comments aside; None where that is not known.
        communication: added lines of communication code: ranks, process groups, collectives, barriers, rendezvous;
            None where the journal has not both texts, or one does not parse.
        by_category: changed lines, added and deleted, in the order of `matrix.changes.apis.CATEGORIES`; None likewise.
        why: of a broken cell, what failed.
        proof: which hunks the cell needs, where that was tried.
    """

    cell: str
    machine: str
    workload: str
    backend: str
    target: str
    state: Literal["ported", "broken"]
    source: str
    baseline: str
    added: int | None
    deleted: int | None
    hunks: int | None
    communication: int | None
    by_category: Mapping[str, int] | None
    why: str
    proof: ProofRecord | None

    @property
    def unneeded(self) -> list[HunkProof]:
        """The hunks that its cell does without."""
        return [hunk for hunk in self.proof.hunks if hunk.verdict == "idle"] if self.proof else []


@dataclass(frozen=True)
class Difference:
    """A port that was tried, against its baseline.

    Attributes:
        cells: in which it was tried, and whether it passed there.
        proofs: by cell, which hunks it needs, where that was tried.
    """

    workload: str
    baseline: str
    port: str
    compared: Compared
    cells: dict[str, bool]
    proofs: dict[str, ProofRecord]

    def marks(self) -> dict[int, list[Mark]]:
        """What is known of each hunk; of cells that say the same only the first. Empty where nothing was tried."""
        found: dict[int, list[Mark]] = {}
        for cell, proof in self.proofs.items():
            for hunk in proof.hunks:
                marks = found.setdefault(hunk.id, [])
                if (hunk.verdict, hunk.why) not in [(mark.verdict, mark.why) for mark in marks]:
                    marks.append(Mark(hunk.verdict, hunk.why, cell))
        return found


@dataclass(frozen=True)
class Mark:
    """Whether a cell needs a hunk, and why."""

    verdict: Literal["required", "performance", "idle", "unproven"]
    why: str
    cell: str


@dataclass(frozen=True)
class Line:
    """A line of a side-by-side view.

    Attributes:
        old: number and text of a line of the baseline; None where the port only adds.
        new: the same of the port.
        hunk: the hunk that both belong to; None outside of hunks, where only layout and comments may differ.
    """

    old: tuple[int, str] | None
    new: tuple[int, str] | None
    hunk: int | None
    kind: Literal["line"] = "line"


def required(evidence: Evidence) -> list[Required]:
    """The cells that a port passed, and those of which the nearest port failed; in the order of the rows."""
    return [found for row in evidence.rows if (found := required_of(row)) is not None]


def required_of(row: Row) -> Required | None:
    """The changes of one cell; None where no port decided."""
    verdict, attempt = row.verdict.verdict, row.verdict.attempt
    if verdict not in ("ported", "broken") or attempt is None or attempt.role != "port" or not attempt.source:
        return None
    workload = row.axes.get("workload", "")
    baseline = _baseline(row)
    found = compared(row, baseline, attempt.source)
    counts = found.comparison.counts if found else attempt.changes
    failure = attempt.failure
    return Required(
        cell=row.cell,
        machine=row.machine,
        workload=workload,
        backend=row.axes.get("backend", ""),
        target=f"{row.axes.get('accelerator', '')}/{row.axes.get('layout', '')}",
        state="ported" if verdict == "ported" else "broken",
        source=attempt.source,
        baseline=baseline or "",
        added=counts.added if counts else None,
        deleted=counts.deleted if counts else None,
        hunks=counts.hunks if counts else None,
        communication=categories.communication(found.hunks) if found else None,
        by_category=categories.total(found.hunks) if found else None,
        why=f"{failure.cause}: {failure.message}" if failure else "",
        proof=row.proof if verdict == "ported" else None,
    )


def _baseline(row: Row) -> str | None:
    return next((a.source for a in row.verdict.attempts if a.role == "baseline" and a.source), None)


@dataclass(frozen=True)
class Compared:
    """A port against its baseline, and its hunks with their lines in categories."""

    comparison: Comparison
    hunks: tuple[categories.Sorted, ...]


def compared(row: Row, baseline: str | None, port: str) -> Compared | None:
    """A port against its baseline, as the journal has them; None when it has not, or one does not parse."""
    sources, workload = row.decided_in.run.sources, row.axes.get("workload", "")
    before, after = sources.get(f"{workload}/{baseline}"), sources.get(f"{workload}/{port}")
    return _compared(before, after) if before is not None and after is not None else None


@lru_cache(MANY)
def _compared(before: str, after: str) -> Compared | None:
    try:
        comparison = changes.compare(before, after)
    except UsageError:
        return None
    return Compared(comparison, tuple(categories.sort(comparison)))


def bars(found: Iterable[Required]) -> dict[tuple[str, str], Counter[str]]:
    """Changed lines by category for each backend and target, over the ported cells; each port counts once.

    Cells of which the categories are not known are left out.
    """
    seen = set()
    counts: dict[tuple[str, str], Counter[str]] = {}
    for each in found:
        mark = each.backend, each.target, each.workload, each.source
        if each.state == "ported" and each.by_category is not None and mark not in seen:
            seen.add(mark)
            counts.setdefault((each.backend, each.target), Counter()).update(each.by_category)
    return counts


def differences(evidence: Evidence) -> list[Difference]:
    """Every port that was tried and whose text is known, once for each text that it had."""
    found: dict[tuple[str, str, str, int], Difference] = {}
    for row in evidence.rows:
        baseline, workload, decided = _baseline(row), row.axes.get("workload", ""), row.verdict.attempt
        for attempt in row.verdict.current:
            if attempt.role != "port" or not attempt.source or attempt.phase != "correctness":
                continue
            pair = compared(row, baseline, attempt.source)
            if pair is None or baseline is None:
                continue
            known = found.setdefault(
                (workload, baseline, attempt.source, id(pair)),
                Difference(workload, baseline, attempt.source, pair, {}, {}),
            )
            known.cells[row.cell] = attempt.outcome == "pass"
            if row.proof and decided is not None and decided.source == attempt.source:
                known.proofs[row.cell] = row.proof
    return list(found.values())


def side_by_side(comparison: Comparison) -> list[Line]:
    """All lines of both files, beside each other: what is equal on one height, hunks where they are."""
    lines: list[Line] = []
    old = new = 1
    for hunk in comparison.hunks:
        lines += _equal(comparison, old, hunk.old[0], new, hunk.new[0])
        before = [(n, _bare(comparison.baseline.lines[n - 1])) for n in range(hunk.old[0], hunk.old[1] + 1)]
        after = [(n, _bare(comparison.port.lines[n - 1])) for n in range(hunk.new[0], hunk.new[1] + 1)]
        lines += [Line(a, b, hunk.id) for a, b in itertools.zip_longest(before, after)]
        old, new = max(old, hunk.old[1] + 1), max(new, hunk.new[1] + 1)
    return lines + _equal(comparison, old, len(comparison.baseline.lines) + 1, new, len(comparison.port.lines) + 1)


def _equal(comparison: Comparison, old: int, old_end: int, new: int, new_end: int) -> list[Line]:
    """Lines of the same code; where comments or layout differ, some stand alone."""
    before = [_bare(line) for line in comparison.baseline.lines[old - 1 : old_end - 1]]
    after = [_bare(line) for line in comparison.port.lines[new - 1 : new_end - 1]]
    lines: list[Line] = []
    a = b = 0
    for a1, a2, b1, b2 in [*changes.differences(before, after), (len(before), len(before), len(after), len(after))]:
        lines += [Line((old + i, before[i]), (new + b + i - a, after[b + i - a]), None) for i in range(a, a1)]
        one = [(old + i, before[i]) for i in range(a1, a2)]
        other = [(new + i, after[i]) for i in range(b1, b2)]
        lines += [Line(x, y, None) for x, y in itertools.zip_longest(one, other)]
        a, b = a2, b2
    return lines


def _bare(line: str) -> str:
    return line.rstrip("\r\n")


# --- exports ---


def markdown(evidence: Evidence) -> str:
    """A section with a line for each cell, and the hunks that no cell needs; empty when nothing was ported."""
    found = required(evidence)
    if not found:
        return ""
    head = ["cell", "port", "lines", "hunks", "communication", "mostly", "proof"]
    lines = ["### Required changes", "", f"| {' | '.join(head)} |", f"|{'|'.join(['---'] * len(head))}|"]
    for each in found[:MOST]:
        kinds = each.by_category or {}
        most = max(kinds, key=lambda name: kinds[name], default="not known")
        communication = "not known" if each.communication is None else str(each.communication)
        known = each.added is not None
        cells = [code(each.cell), code(each.source), f"+{each.added} -{each.deleted}" if known else "not known"]
        cells.append(str(each.hunks) if known else "not known")
        words = _proof_words(each) if each.state == "ported" else plain(f"broken: {each.why}", 160)
        lines.append(f"| {' | '.join([*cells, communication, most, words])} |")
    if len(found) > MOST:
        lines += ["", f"{len(found) - MOST} more in changes.csv."]
    return "\n".join(lines) + "\n"


def _proof_words(each: Required) -> str:
    if each.proof is None or not each.proof.complete:
        return "not proven"
    counts = Counter(hunk.verdict for hunk in each.proof.hunks)
    return ", ".join(
        f"{counts[name]} {name}" for name in ("required", "performance", "idle", "unproven") if counts[name]
    )


def write_csv(evidence: Evidence, path: Path) -> None:
    """One line for each cell, with a column for each category."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        own = ["cell", "machine", "backend", "target", "state", "source", "lines_added", "lines_deleted", "hunks"]
        writer.writerow([*own, "communication", *CATEGORIES, "required", "performance", "idle", "why"])
        for each in required(evidence):
            verdicts = Counter(hunk.verdict for hunk in each.proof.hunks) if each.proof else None
            words = [each.cell, each.machine, each.backend, each.target, each.state, each.source]
            numbers = [each.added, each.deleted, each.hunks, each.communication]
            counted = [verdicts[name] if verdicts else None for name in ("required", "performance", "idle")]
            kinds = each.by_category
            by_category = [None if kinds is None else kinds.get(name, 0) for name in CATEGORIES]
            writer.writerow([*map(safe, words), *numbers, *by_category, *counted, safe(each.why)])
