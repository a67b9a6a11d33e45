"""What the rows say together: counts per backend and accelerator, failures by signature, and one headline."""

from __future__ import annotations

import datetime
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from matrix.journal import AttemptRecord, Journal
from matrix.judge import CellVerdict, Verdict
from reports import words
from reports.merge import Evidence, Row
from reports.text import count, listing, one_line
from reports.units import moment, parsed

OLD_DAYS = 7


@dataclass
class Tally:
    """Counts of verdicts over some rows.

    Attributes:
        verdicts: rows by verdict.
        evidence: the unproven ones by their evidence.
        changed: changed lines (added and deleted) of every ported row.
        unexpected: rows that do not stand as expected.
    """

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    evidence: Counter[str] = field(default_factory=Counter)
    changed: list[int] = field(default_factory=list)
    executed: int = 0
    total: int = 0
    unexpected: int = 0

    def add(self, row: Row) -> None:
        verdict = row.verdict
        self.verdicts[verdict.verdict] += 1
        self.total += 1
        self.executed += verdict.executed
        self.unexpected += row.unexpected
        if verdict.verdict == "unproven":
            self.evidence[verdict.evidence] += 1
        if verdict.changes:
            self.changed.append(verdict.changes.added + verdict.changes.deleted)

    @property
    def median_changed(self) -> float | None:
        return statistics.median(self.changed) if self.changed else None

    @property
    def changed_words(self) -> str:
        """`7 lines`, `3 to 24 lines`; empty when nothing was ported."""
        if not self.changed:
            return ""
        low, high = min(self.changed), max(self.changed)
        return count(low, "line") if low == high else f"{low:,} to {high:,} lines"

    @property
    def evidence_words(self) -> str:
        """`3 compiled, 2 without evidence`, strongest first; only the word where all have the same: `compiled`."""
        order = [name for name in words.EVIDENCE if name != "none" and self.evidence[name]]
        parts = [f"{self.evidence[name]:,} {name}" for name in order]
        if self.evidence["none"]:
            parts.append(f"{self.evidence['none']:,} without evidence")
        return ", ".join(parts) if len(parts) > 1 else parts[0].partition(" ")[2] if parts else ""


@dataclass(frozen=True)
class Signature:
    """Failures that are one failure: same cause, same message but for its numbers, same place.

    Attributes:
        id: the signature as recorded.
        cause: of the failure; `error` for the tool's own.
        message: of the first such failure.
        frame: innermost frame in the user's code.
        broken: rows that it breaks.
        ported: rows whose baseline it breaks and a port cures.
    """

    id: str
    cause: str
    message: str
    frame: str | None
    broken: tuple[Row, ...]
    ported: tuple[Row, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.broken + self.ported


def tally(rows: Iterable[Row]) -> Tally:
    """Counts over all of `rows`."""
    total = Tally()
    for row in rows:
        total.add(row)
    return total


def by_target(rows: Iterable[Row]) -> dict[tuple[str, str], Tally]:
    """Counts per backend and accelerator, in the order of the plan."""
    tallies: dict[tuple[str, str], Tally] = {}
    for row in rows:
        target = row.axes.get("backend", ""), row.axes.get("accelerator", "")
        tallies.setdefault(target, Tally()).add(row)
    return tallies


def signatures(rows: Iterable[Row]) -> list[Signature]:
    """The failures that count now, grouped, those that break the most rows first."""
    found: dict[str, tuple[str, str, str | None]] = {}
    broken: dict[str, list[Row]] = {}
    ported: dict[str, list[Row]] = {}
    for row in rows:
        attempt = failed_attempt(row.verdict)
        if attempt is None:
            continue
        failure = attempt.failure
        if failure is None:
            cause, message, frame = words.TOOL_ERROR, attempt.reason or "the tool failed", None
        else:
            cause, message, frame = failure.cause, failure.message, failure.frame
        key = (failure.signature if failure else "") or f"{cause}: {one_line(message, 120)} {frame or ''}".strip()
        found.setdefault(key, (cause, one_line(message), frame))
        (ported if row.verdict.verdict == "ported" else broken).setdefault(key, []).append(row)
    groups = [Signature(key, *found[key], tuple(broken.get(key, ())), tuple(ported.get(key, ()))) for key in found]
    return sorted(groups, key=lambda group: (-len(group.broken), -len(group.rows), group.cause, group.id))


def failed_attempt(verdict: CellVerdict) -> AttemptRecord | None:
    """The attempt that shows what is wrong: the deciding one, or the baseline's where a port runs."""
    if verdict.verdict in ("broken", "refused", "error"):
        return verdict.attempt
    if verdict.verdict != "ported":
        return None
    failed = [a for a in verdict.current if a.role == "baseline" and a.outcome == "fail" and a.failure]
    return failed[-1] if failed else None


def headline(total: Tally) -> str:
    """The answer in one sentence. Only executed cells enter the score."""
    if not total.total:
        return "Nothing was planned."
    if not total.executed:
        return f"None of {count(total.total, 'cell')} was executed, so nothing is proven."
    good = total.verdicts["as-is"] + total.verdicts["ported"]
    of = f"of {count(total.executed, 'executed cell')}"
    if not good:
        return f"None {of} runs."
    ran = f"{good:,} {of} {'runs' if good == 1 else 'run'}"
    if good == total.executed > 1:
        ran = f"All {count(good, 'executed cell')} run"
    if not total.verdicts["ported"]:
        return f"{ran}, unchanged."
    if not total.verdicts["as-is"]:
        return f"{ran}, {'all of them ' if good > 1 else ''}after a port."
    return f"{ran}, {total.verdicts['as-is']:,} of them unchanged."


def particulars(total: Tally) -> str:
    """The sentence after the headline: what had to change, what is broken, what is not known."""
    parts = []
    if total.verdicts["ported"]:
        median = total.median_changed
        change = f" (median {count(round(median), 'changed line')})" if median is not None else ""
        parts.append(f"{total.verdicts['ported']:,} after a port{change}")
    if total.verdicts["broken"]:
        parts.append(f"{total.verdicts['broken']:,} broken")
    if total.verdicts["refused"]:
        parts.append(f"{total.verdicts['refused']:,} refused without being executed")
    if total.verdicts["unproven"]:
        parts.append(f"{total.verdicts['unproven']:,} unproven ({total.evidence_words})")
    if total.verdicts["error"]:
        parts.append(f"{total.verdicts['error']:,} ended in an error of the tool")
    return f"{listing(parts)}." if parts else ""


def expectations(total: Tally) -> str:
    """Whether the results are what the definition expects."""
    if not total.unexpected:
        return "Everything is as expected."
    return f"{count(total.unexpected, 'cell')} {'is' if total.unexpected == 1 else 'are'} not as expected."


@dataclass(frozen=True)
class Banner:
    """A caveat that a reader must see before the numbers; `kind` is partial, damaged, old, or notice."""

    kind: str
    text: str


def banners(evidence: Evidence, today: datetime.date) -> list[Banner]:
    """What limits the trust in these data."""
    found = []
    for journal in evidence.journals:
        name = one_line(f"{journal.run.run} on {journal.run.machine}")
        if journal.partial:
            found.append(
                Banner("partial", f"Partial: run {name} has no end record; it is still going on, or was stopped.")
            )
        if journal.damaged:
            shown = "; ".join(journal.damaged[:3]) + ("; …" if len(journal.damaged) > 3 else "")
            lost = count(len(journal.damaged), "line")
            found.append(Banner("damaged", f"Damaged: {lost} of run {name} could not be read ({shown})."))
        found += [Banner("notice", one_line(f"{journal.run.run}: {notice}")) for notice in journal.run.notices]
    found += [Banner("damaged", one_line(f"Not read: {text}")) for text in evidence.unreadable]
    if evidence.unplanned:
        number = count(evidence.unplanned, "attempt")
        found.append(Banner("notice", f"{number} of cells that are no longer planned are left out."))
    old = _old(evidence, today)
    return [*([old] if old else []), *found]


def _old(evidence: Evidence, today: datetime.date) -> Banner | None:
    ends = [(parsed(last_moment(journal)), journal) for journal in evidence.journals]
    old = [end for end, _ in ends if end and (today - end.date()).days > OLD_DAYS]
    if not old:
        return None
    days = (today - min(old).date()).days
    which = "These data are" if len(old) == len(ends) else f"{len(old):,} of {count(len(ends), 'run')} are"
    return Banner("old", f"Old: {which} {days:,} days old (from {moment(min(old).isoformat())}).")


def last_moment(journal: Journal) -> str:
    """When the newest thing in a journal happened (RFC 3339)."""
    if journal.end:
        return journal.end.ended
    return max((attempt.started for attempt in journal.attempts), default="") or journal.run.started
