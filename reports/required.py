"""What had to change: for every cell that runs only after a port, or not even then; as rows, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
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


@dataclass(frozen=True)
class Required:
    """The changes of a cell.

    Attributes:
        cell: its id.
        backend: how its script is executed.
        target: its accelerator and layout, as `cuda/dp2`.
        state: `ported`, or `broken`: then this is the nearest port that was tried, and it failed.
        source: the port; baseline: the script that it is a port of.
        added, deleted, hunks: in lines of code, formatting and comments aside.
        communication: added lines of communication code: ranks, process groups, collectives, barriers, rendezvous.
        by_category: changed lines, added and deleted, in the order of `matrix.changes.apis.CATEGORIES`.
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
    added: int
    deleted: int
    hunks: int
    communication: int
    by_category: Mapping[str, int]
    why: str
    proof: ProofRecord | None

    @property
    def unneeded(self) -> list[HunkProof]:
        """The hunks that its cell does without."""
        return [hunk for hunk in self.proof.hunks if hunk.verdict == "idle"] if self.proof else []


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


def required(evidence: Evidence) -> list[Required]:
    """The cells that a port passed, and those of which the nearest port failed; in the order of the rows."""
    return [found for row in evidence.rows if (found := _required(row)) is not None]


def _required(row: Row) -> Required | None:
    verdict, attempt = row.verdict.verdict, row.verdict.attempt
    if verdict not in ("ported", "broken") or attempt is None or attempt.role != "port" or not attempt.source:
        return None
    workload = row.axes.get("workload", "")
    baseline = next((a.source for a in row.verdict.attempts if a.role == "baseline" and a.source), None)
    comparison = compared(row, baseline, attempt.source)
    found = categories.sort(comparison) if comparison else []
    counts = comparison.counts if comparison else attempt.changes
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
        added=counts.added if counts else 0,
        deleted=counts.deleted if counts else 0,
        hunks=counts.hunks if counts else 0,
        communication=categories.communication(found),
        by_category=categories.total(found),
        why=f"{failure.cause}: {failure.message}" if failure else "",
        proof=row.proof if verdict == "ported" else None,
    )


def compared(row: Row, baseline: str | None, port: str) -> Comparison | None:
    """A port against its baseline, as the journal has them; None when it has not, or one does not parse."""
    sources, workload = row.decided_in.run.sources, row.axes.get("workload", "")
    before, after = sources.get(f"{workload}/{baseline}"), sources.get(f"{workload}/{port}")
    return _compared(before, after) if before is not None and after is not None else None


@cache
def _compared(before: str, after: str) -> Comparison | None:
    try:
        return changes.compare(before, after)
    except UsageError:
        return None


def bars(found: Iterable[Required]) -> dict[tuple[str, str], Counter[str]]:
    """Changed lines by category for each backend and target, over the ported cells; each port counts once."""
    seen = set()
    counts: dict[tuple[str, str], Counter[str]] = {}
    for each in found:
        mark = each.backend, each.target, each.workload, each.source
        if each.state == "ported" and mark not in seen:
            seen.add(mark)
            counts.setdefault((each.backend, each.target), Counter()).update(each.by_category)
    return counts


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
    for each in found:
        most = max(each.by_category, key=lambda name: each.by_category[name], default="")
        cells = [code(each.cell), code(each.source), f"+{each.added} -{each.deleted}", str(each.hunks)]
        words = _proof_words(each) if each.state == "ported" else plain(f"broken: {each.why}", 160)
        lines.append(f"| {' | '.join([*cells, str(each.communication), most, words])} |")
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
            by_category = [each.by_category.get(name, 0) for name in CATEGORIES]
            writer.writerow([*map(safe, words), *numbers, *by_category, *counted, safe(each.why)])


def as_json(evidence: Evidence) -> str:
    """Everything, the proofs included."""
    rows = []
    for each in required(evidence):
        proof = each.proof.model_dump(mode="json", exclude_none=True) if each.proof else None
        rows.append({**vars(each), "by_category": dict(each.by_category), "proof": proof})
    return json.dumps(rows, indent=1)


def texts(comparison: Comparison, proof: ProofRecord | None) -> dict[int, str]:
    """For each hunk, what to write beside it: its verdict and why, or its categories where nothing was tried."""
    proven = {hunk.id: hunk for hunk in proof.hunks} if proof else {}
    words = {}
    for each in categories.sort(comparison):
        hunk = proven.get(each.hunk.id)
        words[each.hunk.id] = f"{hunk.verdict}: {hunk.why}" if hunk else ", ".join(each.categories)
    return words
