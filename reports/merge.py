"""From journals to one set of rows: a row for every planned cell and machine that has something to say about it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from matrix.errors import UsageError
from matrix.journal import AttemptRecord, Journal, JournalError, PlannedCell, ProofRecord, find, read
from matrix.judge import CellVerdict, judge_cell
from reports.metrics import Speed, speed
from reports.units import parsed


@dataclass(frozen=True)
class Row:
    """A cell on a machine.

    Attributes:
        verdict: what is known of it, from the attempts of this machine.
        machine: where the attempts ran, or should have run.
        journals: for each attempt of the verdict, the journal it came from.
        journal: the journal whose plan, references and sources speak for the cell.
        elsewhere: attempts of other machines that had less to say and yielded to this row.
    """

    verdict: CellVerdict
    machine: str
    journals: tuple[Journal, ...]
    journal: Journal
    elsewhere: tuple[AttemptRecord, ...] = ()

    @property
    def cell(self) -> str:
        return self.verdict.cell.cell

    @property
    def axes(self) -> dict[str, str]:
        return self.verdict.cell.axes

    @property
    def unexpected(self) -> bool:
        """Whether the row keeps the exit code from 0."""
        return not self.verdict.as_expected or self.verdict.tool_failed

    @property
    def proof(self) -> ProofRecord | None:
        """What of the port that runs here was shown to be needed, where that was tried."""
        attempt = self.verdict.attempt
        if attempt is None or attempt.role != "port":
            return None
        wanted = self.cell, attempt.source, self.machine
        found = [p for j in self.journals for p in j.proofs if (p.cell, p.source, p.machine) == wanted]
        return found[-1] if found else None

    @cached_property
    def speed(self) -> Speed | None:
        """How fast the cell is here; None when it was not measured."""
        return speed(self.verdict)

    @property
    def decided_in(self) -> Journal:
        """The journal of the attempt that decided; the planning one when there is none."""
        for attempt, journal in zip(self.verdict.attempts, self.journals, strict=True):
            if attempt is self.verdict.attempt:
                return journal
        return self.journal


@dataclass(frozen=True)
class Evidence:
    """All that some journals say, as rows in the order of the plan.

    Attributes:
        rows: by cell, and within a cell by machine.
        journals: oldest first.
        unreadable: files that were given and are no journals, in words.
        unplanned: how many attempts belong to cells that no plan names any more.
    """

    rows: tuple[Row, ...]
    journals: tuple[Journal, ...]
    unreadable: tuple[str, ...] = ()
    unplanned: int = 0

    @property
    def verdicts(self) -> list[CellVerdict]:
        return [row.verdict for row in self.rows]

    @property
    def machines(self) -> list[str]:
        return list(dict.fromkeys(journal.run.machine for journal in self.journals))


def load(paths: Iterable[Path], today: datetime.date | None = None) -> Evidence:
    """Read the journals at or below `paths` and merge them.

    Args:
        paths: journals, run folders, or folders of runs; one that is named twice counts once.
        today: the day against which expectations expire; the current one when left out.

    Raises:
        UsageError: a path does not exist, or there is no readable journal at any of them.
    """
    paths = list(paths)
    for path in paths:
        if not path.exists():
            raise UsageError(f"no such file or folder: {path}")
    journals: list[Journal] = []
    unreadable: list[str] = []
    for path in dict.fromkeys(found.resolve() for found in find(paths)):
        try:
            journals.append(read(path))
        except JournalError as error:
            unreadable.append(str(error))
    if not journals:
        reason = "; ".join(unreadable) or "no journal.jsonl at or below " + ", ".join(map(str, paths))
        raise UsageError(f"nothing to report: {reason}. Give a run's folder, as `portmatrix run` names it at its end")
    return merge(journals, today, unreadable)


def merge(journals: Iterable[Journal], today: datetime.date | None = None, unreadable: Sequence[str] = ()) -> Evidence:
    """One set from journals: the plan is the union, attempts of a cell on one machine all stay, others are other rows.

    A machine that did not execute a cell yields to one that did, as a weaker attempt does to an executed one on the
    same machine; a machine that only found the accelerator absent yields to any evidence. The tool's own errors never
    yield.
    """
    today = today or datetime.datetime.now(datetime.UTC).date()
    ordered = sorted(journals, key=_age)
    plans: dict[str, dict[str, tuple[PlannedCell, Journal]]] = {}  # cell -> machine -> newest plan of it
    for journal in reversed(ordered):
        for cell in journal.run.plan:
            plans.setdefault(cell.cell, {}).setdefault(journal.run.machine, (cell, journal))
    attempts: dict[str, dict[str, list[tuple[AttemptRecord, Journal]]]] = {}
    for attempt, journal in _distinct(ordered):
        attempts.setdefault(attempt.cell, {}).setdefault(attempt.machine, []).append((attempt, journal))
    rows: list[Row] = []
    for name, planned in plans.items():
        rows += _rows_of_cell(planned, attempts.get(name, {}), today)
    unplanned = sum(len(p) for name, by in attempts.items() if name not in plans for p in by.values())
    return Evidence(tuple(rows), tuple(ordered), tuple(unreadable), unplanned)


def _age(journal: Journal) -> tuple[str, str]:
    started = parsed(journal.run.started)
    return started.isoformat() if started else "", journal.run.run


def _distinct(journals: Sequence[Journal]) -> Iterator[tuple[AttemptRecord, Journal]]:
    """Every attempt once, also when a copy of its journal was given."""
    if len({(journal.run.run, journal.run.machine) for journal in journals}) == len(journals):
        for journal in journals:
            for attempt in journal.attempts:
                yield attempt, journal
        return
    seen = set()
    for journal in journals:
        for attempt in journal.attempts:
            mark = (attempt.run, attempt.machine, attempt.cell, attempt.attempt, attempt.started, attempt.outcome)
            if mark not in seen:
                seen.add(mark)
                yield attempt, journal


def _rows_of_cell(
    planned: dict[str, tuple[PlannedCell, Journal]],
    attempts: dict[str, list[tuple[AttemptRecord, Journal]]],
    today: datetime.date,
) -> list[Row]:
    rows = []
    for machine in dict.fromkeys([*planned, *attempts]):
        cell, journal = planned.get(machine) or next(iter(planned.values()))
        pairs = attempts.get(machine, [])
        verdict = judge_cell(cell, [attempt for attempt, _ in pairs], today)
        rows.append(Row(verdict, machine, tuple(journal for _, journal in pairs), journal))
    if len(rows) == 1:
        return rows
    best = max(_weight(row) for row in rows)
    kept = [row for row in rows if _weight(row) == best or row.verdict.verdict == "error"]
    if best == 0:  # nobody knows anything: one row says so, preferably one with a reason
        kept = [next((row for row in rows if row.verdict.attempts), rows[0])]
    elsewhere = tuple(a for row in rows if row not in kept for a in row.verdict.attempts)
    return [Row(r.verdict, r.machine, r.journals, r.journal, elsewhere) for r in kept] if elsewhere else kept


def _weight(row: Row) -> int:
    """2 for a machine that executed the cell, 1 for weaker evidence, 0 for none."""
    if row.verdict.executed:
        return 2
    return int(any(a.evidence != "none" or a.outcome == "error" for a in row.verdict.attempts))
