"""From what was observed of an attempt to its outcome: pass, or fail with one cause, or the tool's own error."""

from __future__ import annotations

from dataclasses import dataclass, field

from matrix import accuracy, truth
from matrix.failures.death import death, simple
from matrix.journal import Failure, Outcome
from matrix.launch.process import Observation
from matrix.plan import Cell
from matrix.truth import Finding, Unseen

VERSION = 3
"""Of the rules in this file, `truth` and `accuracy`; part of every key, so that a change of them judges anew."""

LOOKS = 2  # progress lines after which an attempt that is untrue is not worth finishing


@dataclass(frozen=True)
class Judged:
    """An attempt's outcome and the numbers that it rests on.

    Attributes:
        outcome: pass, fail or error.
        failure: for `fail`, the cause and where.
        reason: for `error`, what the tool could not do.
        losses: `(step, loss)` of the reporting rank.
        evaluation: the value of its `eval=` line.
        deviation: largest relative deviation from the reference.
        tolerance: the tolerance that applied.
        precision: the effective matmul precision.
        truth: what is known of the devices.
    """

    outcome: Outcome
    failure: Failure | None = None
    reason: str | None = None
    losses: list[tuple[int, float]] = field(default_factory=list)
    evaluation: float | None = None
    deviation: float | None = None
    tolerance: float | None = None
    precision: str | None = None
    truth: truth.Truth = field(default_factory=lambda: truth.Truth(None, None, ""))


def losses(seen: Observation) -> list[tuple[int, float]]:
    """`(step, loss)` as the reporting rank printed them."""
    return [(int(event["step"]), float(event["loss"])) for event in seen.of("progress", seen.reporter)]


def check_truth(cell: Cell, seen: Observation) -> truth.Truth:
    """What the observers' reports amount to for this cell."""
    reports = {}
    for rank in seen.events:
        report, start = seen.last("seen", rank) or seen.last("blind", rank), seen.last("start", rank)
        if start is not None:
            end = seen.last("end", rank) or {}
            broke = bool(seen.of("blind", rank))
            reports[rank] = {**(report or {}), "host": start["host"], "gave_up": end.get("gave_up"), "broke": broke}
    through = cell.backend.through
    return truth.check(
        reports,
        cell.layout,
        cell.backend.framework,
        cell.accelerator.name + (f" through {through}" if through else ""),
        lambda device: device.get("through") == through and cell.accelerator.owns(device),
        cell.backend.compiles,
        truth.units_per_step(seen.of("progress", seen.reporter)),
        2 if cell.workload.unit == "tokens" else 1,
    )


def is_untrue(cell: Cell, seen: Observation) -> bool:
    """Whether what was seen up to the second progress line already shows that the attempt fails."""
    lines = losses(seen)
    reported = [rank for rank in seen.events if seen.of("seen", rank)]
    if len(lines) < LOOKS or any(seen.of("exception", rank) for rank in seen.events):
        return False
    if reported and len(reported) == len(seen.events) and isinstance(check_truth(cell, seen).problem, Finding):
        return True
    if len(lines) > LOOKS:
        return False  # later losses are judged at the end, so that the whole trajectory can be shown
    reports = [report for rank in reported if (report := seen.last("seen", rank))]
    return _inaccurate(cell, lines, None, accuracy.precision(reports, cell.accelerator.name))[0] is not None


def _inaccurate(
    cell: Cell, lines: list[tuple[int, float]], evaluation: float | None, precision: str | None
) -> tuple[Finding | None, float | None, float | None]:
    """The first value that is not finite or outside its tolerance; the deviation; the tolerance."""
    reference = cell.reference
    limit = accuracy.tolerance(reference, precision) if reference and precision else None
    unfinite = accuracy.first_not_finite(lines, evaluation)
    if reference is None or limit is None:
        return unfinite, None, limit
    wrong, off = accuracy.compare(lines, evaluation, reference, limit)
    return unfinite or wrong, off, limit


def judge(cell: Cell, seen: Observation, steps: int | None, log_every: int | None) -> Judged:
    """The outcome of an attempt that has ended.

    Args:
        cell: what it was an attempt of.
        seen: what was observed.
        steps: steps that the script was asked for, if it takes such an argument.
        log_every: likewise the steps from one progress line to the next.
    """
    lines = losses(seen)
    final = seen.last("eval", seen.reporter)
    evaluation = float(final["value"]) if final else None
    known = check_truth(cell, seen)
    reports = [report for rank in seen.events if (report := seen.last("seen", rank))]
    precision = accuracy.precision(reports, cell.accelerator.name)
    wrong, off, limit = _inaccurate(cell, lines, evaluation, precision)
    root = str(cell.workload.folder)

    def judged(outcome: Outcome, failure: Failure | None = None, reason: str | None = None) -> Judged:
        return Judged(outcome, failure, reason, lines, evaluation, off, limit, precision, known)

    if seen.trouble:
        return judged("error", reason=seen.trouble)
    died = death(seen, root) if seen.ended_by != "untrue" else None
    if died is not None:
        return judged("fail", _after(died, accuracy.first_not_finite(lines, None)))
    if isinstance(known.problem, Finding) and lines:
        return judged("fail", _found(known.problem))
    if wrong is not None:
        return judged("fail", _found(wrong))
    if seen.ended_by == "untrue":  # nothing may be concluded from how we ended it
        return judged("error", reason="it was ended as untrue, but what it had reported by then does not show it")
    if not lines:
        printed = _silent(seen)
        if printed:
            return judged("error", reason=printed)
        return judged("fail", _found(Finding("no-progress", "it ended cleanly without one progress line")))
    absent = accuracy.missing(lines, evaluation, cell.reference, steps, log_every)
    if absent is not None:
        return judged("fail", _found(absent))
    if isinstance(known.problem, Unseen):
        blind = next((event["reason"] for rank in seen.events for event in seen.of("blind", rank)), None)
        return judged("error", reason=known.problem.message + (f" (the observer broke: {blind})" if blind else ""))
    if cell.reference is not None and limit is None:
        return judged(
            "error",
            reason=f"its matrix products ran at precision '{precision}', for which workload.yaml has no tolerance"
            if precision
            else "the precision of its matrix products could not be seen",
        )
    return judged("pass")


def _after(died: Failure, unfinite: Finding | None) -> Failure:
    """A failure that came after a loss was not finite says so: the one may be the reason of the other."""
    if unfinite is None:
        return died
    return died.model_copy(update={"message": f"{died.message}\n(before that, {unfinite.message})"})


def _found(finding: Finding) -> Failure:
    return simple(finding.cause, finding.message)


def _silent(seen: Observation) -> str | None:
    """Why no progress was seen although a log holds some: a process that nobody watched printed it."""
    for path in seen.logs.values():
        with path.open("rb") as file:
            for line in file:
                if seen.is_progress(line):
                    return (
                        "progress was printed, but not through the script's own sys.stdout or sys.stderr "
                        "(by a child process or a C library): what it did could not be observed"
                    )
    return None
