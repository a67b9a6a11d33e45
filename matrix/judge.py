"""From attempts and expectations to a verdict for every cell and an exit code; used by the run and by the report."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from matrix.failures import CAUSES
from matrix.journal import AttemptRecord, Changes, PlannedCell

Verdict = Literal["as-is", "ported", "broken", "refused", "unproven", "error"]
ExpectationState = Literal["none", "met", "passed", "other-cause", "expired", "untested"]

EXIT_AS_EXPECTED = 0
EXIT_NOT_AS_EXPECTED = 1
EXIT_USAGE = 2
EXIT_NOTHING_EXECUTED = 3
EXIT_TOOL_ERROR = 4
EXIT_INCOMPLETE = 5
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class CellVerdict:
    """What is known of a cell, and from which attempt.

    Attributes:
        cell: the plan's cell.
        verdict: by the table in the README ("Verdicts").
        why: one line for a person: how it runs, what failed, or why nothing is known.
        attempt: the attempt that decided (None when there is none).
        attempts: every attempt of the cell, correctness and measurement, in order.
        expectation: how the cell stands to the known failure that the definition declares.
        as_expected: whether the cell, for itself, allows exit code 0.
    """

    cell: PlannedCell
    verdict: Verdict
    why: str
    attempt: AttemptRecord | None
    attempts: tuple[AttemptRecord, ...]
    expectation: ExpectationState
    as_expected: bool

    @property
    def executed(self) -> bool:
        """Whether any attempt ran on the cell's own accelerator to a result, good or bad."""
        return _executed(self.current)

    @property
    def current(self) -> list[AttemptRecord]:
        """The attempts that speak for the cell now (see `current`)."""
        return current(self.attempts, self.cell.sources)

    @property
    def tool_failed(self) -> bool:
        """Whether the last that is known of some source and phase is the tool's own error."""
        last = {(a.source, a.phase): a.outcome for a in self.current}
        return self.verdict == "error" or "error" in last.values()

    @property
    def cause(self) -> str | None:
        return self.attempt.failure.cause if self.attempt and self.attempt.failure else None

    @property
    def evidence(self) -> str:
        return self.attempt.evidence if self.attempt else "none"

    @property
    def changes(self) -> Changes | None:
        """Lines that the port which passed adds and deletes against the baseline."""
        return self.attempt.changes if self.attempt and self.verdict == "ported" else None


def judge(
    plan: Iterable[PlannedCell],
    attempts: Iterable[AttemptRecord],
    today: datetime.date | None = None,
) -> list[CellVerdict]:
    """Give every planned cell its verdict, in the plan's order.

    Args:
        plan: the cells of a run.
        attempts: attempt records of that run (or of several, merged); those of other cells are ignored.
        today: the day against which expectations expire; the current one when left out.
    """
    by_cell: dict[str, list[AttemptRecord]] = {}
    for attempt in attempts:
        by_cell.setdefault(attempt.cell, []).append(attempt)
    today = today or datetime.datetime.now(datetime.UTC).date()
    return [judge_cell(cell, by_cell.get(cell.cell, []), today) for cell in plan]


def judge_cell(cell: PlannedCell, attempts: Sequence[AttemptRecord], today: datetime.date) -> CellVerdict:
    """The verdict of one cell from its attempts (see `judge`)."""
    speaking = current(attempts, cell.sources)
    verdict, why, deciding = _verdict(cell, speaking)
    state = _expectation(cell, verdict, deciding, today)
    failed = verdict in ("broken", "refused")
    as_expected = (
        verdict != "error"
        and not (failed and state != "met")
        and state not in ("passed", "other-cause", "expired")
        and not (cell.required and not _executed(speaking))
    )
    return CellVerdict(cell, verdict, why, deciding, tuple(attempts), state, as_expected)


def _executed(attempts: Sequence[AttemptRecord]) -> bool:
    return any(a.evidence == "executed" and a.outcome in ("pass", "fail") for a in attempts)


def current(attempts: Sequence[AttemptRecord], sources: Sequence[str] | None = None) -> list[AttemptRecord]:
    """The attempts that speak for the cell now: of each source and phase, those of the newest key.

    After an edit of a script or a reference, the attempts made before it stay in the journal as history; so do
    measurements of a source that was edited and has not been measured since. What a cell shows without its
    accelerator has such a history for each target.

    Args:
        attempts: of one cell, the oldest first.
        sources: those that the cell has now; attempts of others are history, too. None where that is not known.
    """
    newest: dict[tuple[str | None, str, str | None], str] = {}

    def tried(source: str | None, phase: str, target: str | None, key: str) -> None:
        if phase == "correctness" and newest.get((source, phase, target)) not in (None, key):
            newest.pop((source, "measurement", None), None)
        newest[source, phase, target] = key

    for attempt in attempts:
        for source, key in (attempt.keys or {}).items():
            tried(source, "correctness", None, key)
        tried(attempt.source, attempt.phase, _target(attempt), attempt.key)
        if attempt.source is not None:  # what was said of the cell before any source was tried
            newest.pop((None, "correctness", None), None)
    there = None if sources is None else {None, *sources}
    return [
        a
        for a in attempts
        if newest.get((a.source, a.phase, _target(a))) == a.key and (there is None or a.source in there)
    ]


MACHINES = frozenset(cause.id for cause in CAUSES.values() if cause.infrastructure)
VALUES = ("wrong-result", "not-finite", "nondeterministic")
"""Causes by which equal bytes once computed otherwise; no later run of them takes that back."""


def decisive(attempts: Sequence[AttemptRecord]) -> AttemptRecord:
    """The attempt that speaks for some of one source and key: it passes only if all of its repeats did.

    A later result counts above an earlier one only where that failed for a cause which may be the machine's, in an
    earlier run for another cause than a wrong value, or by this tool.
    """
    results = [a for a in attempts if a.outcome in ("pass", "fail")]
    if not results:
        return attempts[0]
    failed = [
        a
        for a in results
        if a.failure is not None
        and a.failure.cause not in MACHINES
        and (a.run == results[-1].run or a.failure.cause in VALUES)
    ]
    return (failed or results)[-1]


def _target(attempt: AttemptRecord) -> str | None:
    """What an attempt without the accelerator is about."""
    return attempt.target.about if attempt.target else None


def _verdict(cell: PlannedCell, attempts: Sequence[AttemptRecord]) -> tuple[Verdict, str, AttemptRecord | None]:
    tried: dict[tuple[str | None, str | None], list[AttemptRecord]] = {}
    for attempt in (a for a in attempts if a.phase == "correctness"):
        tried.setdefault((attempt.source, _target(attempt)), []).append(attempt)
    results = [decisive(each) for each in tried.values()]
    errors = [a for a in results if a.outcome == "error"]
    if any(a.role != "port" for a in errors):  # what the baseline does is not known, whatever a port does
        return "error", errors[-1].reason or "the tool failed", errors[-1]
    executed = [a for a in results if a.evidence == "executed" and a.outcome in ("pass", "fail")]
    passed = [a for a in executed if a.outcome == "pass"]
    if passed:
        attempt = next((a for a in passed if a.role == "baseline"), passed[-1])
        flaw = _measured_wrong(attempts, attempt)
        if flaw:
            return "broken", flaw.failure.message if flaw.failure else "failed when measured", flaw
        return _passed("as-is" if attempt.role == "baseline" else "ported", cell, attempt)
    if errors:
        return "error", errors[-1].reason or "the tool failed", errors[-1]
    if executed:
        attempt = _telling(executed)
        message = attempt.failure.message if attempt.failure else "failed"
        return "broken", message, attempt
    return _shown(results)


STRENGTH = ("executed", "compiled", "traced", "lowered", "none")


def _shown(results: Sequence[AttemptRecord]) -> tuple[Verdict, str, AttemptRecord | None]:
    """The verdict of a cell that was not executed: refused as soon as one of its targets accepts no source of it."""
    if not results:
        return "unproven", "not run", None
    accepted: dict[str | None, AttemptRecord] = {}
    refused: dict[str | None, AttemptRecord] = {}
    for attempt in sorted(results, key=lambda a: STRENGTH.index(a.evidence)):
        if attempt.outcome == "pass":
            accepted.setdefault(_target(attempt), attempt)
        elif attempt.outcome == "fail" and attempt.evidence != "none":
            refused[_target(attempt)] = attempt
    unknown = {_target(attempt) for attempt in results if attempt.outcome == "unavailable"}  # of one of its sources
    for target, attempt in refused.items():
        if target not in accepted and target not in unknown:
            message = attempt.failure.message if attempt.failure else "the compiler refused"
            return "refused", f"when {attempt.evidence}{f' for {target}' if target else ''}: {message}", attempt
    if not accepted:
        last = results[-1]
        return "unproven", last.reason or (last.failure.message if last.failure else "unavailable"), last
    words: dict[tuple[str, str], list[str]] = {}
    for target, attempt in accepted.items():
        port = f" by {_ported(attempt)}" if attempt.role == "port" else ""
        words.setdefault((attempt.evidence, port), []).append(target or "")
    shown = [
        f"{kind} for {' and '.join(names)}{port}" if all(names) else kind + port
        for (kind, port), names in words.items()
    ]
    return "unproven", f"{'; '.join(shown)}, not executed", next(iter(accepted.values()))


def _telling(executed: Sequence[AttemptRecord]) -> AttemptRecord:
    """Of attempts that all failed the one to show: the nearest port's, which says more than the baseline's."""
    ports = [a for a in executed if a.role == "port"]
    return min(ports or executed, key=lambda a: a.changes.added + a.changes.deleted if a.changes else 0)


def _measured_wrong(attempts: Sequence[AttemptRecord], passed: AttemptRecord) -> AttemptRecord | None:
    """A measurement attempt of the passing source that failed: a longer run of it is not right after all."""
    for attempt in attempts:
        failed = attempt.phase == "measurement" and attempt.source == passed.source and attempt.outcome == "fail"
        if failed and (attempt.failure is None or attempt.failure.cause not in MACHINES):
            return attempt
    return None


def _passed(verdict: Verdict, cell: PlannedCell, attempt: AttemptRecord) -> tuple[Verdict, str, AttemptRecord]:
    if attempt.metrics.tolerance is None:
        return "unproven", "executed, but the workload has no reference to hold its result against", attempt
    if verdict == "as-is":
        why = f"written for {cell.written_for}" if cell.written_for not in (None, "any") else "device-agnostic source"
    else:
        why = _ported(attempt)
    return verdict, why, attempt


def _ported(attempt: AttemptRecord) -> str:
    """A port with the lines that it changes: `ddp.py (+14 -1)`."""
    changes = attempt.changes
    return f"{attempt.source} (+{changes.added} -{changes.deleted})" if changes else f"{attempt.source}"


def _expectation(
    cell: PlannedCell, verdict: Verdict, deciding: AttemptRecord | None, today: datetime.date
) -> ExpectationState:
    expected = cell.expectation
    if expected is None:
        return "none"
    if verdict in ("as-is", "ported"):
        return "passed"
    if verdict not in ("broken", "refused"):
        return "untested"
    if expected.until is not None and today > datetime.date.fromisoformat(expected.until):
        return "expired"
    cause = deciding.failure.cause if deciding and deciding.failure else None
    return "met" if cause == expected.cause else "other-cause"


def exit_code(verdicts: Sequence[CellVerdict], complete: bool = True) -> int:
    """The exit code of a run or a report over these verdicts (the module's EXIT_ constants).

    Args:
        complete: whether all that was to be run was run.
    """
    if any(v.tool_failed for v in verdicts):
        return EXIT_TOOL_ERROR
    if not all(v.as_expected for v in verdicts):
        return EXIT_NOT_AS_EXPECTED
    if not complete:
        return EXIT_INCOMPLETE
    if not any(v.executed for v in verdicts):
        return EXIT_NOTHING_EXECUTED
    return EXIT_AS_EXPECTED
