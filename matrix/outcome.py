"""From what was observed of an attempt to its outcome: pass, or fail with one cause, or the tool's own error."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matrix import accuracy, failures, truth
from matrix.journal import Failure, Outcome
from matrix.launch.process import Event, Observation, rank_codes
from matrix.plan import Cell
from matrix.truth import Finding, Unseen

VERSION = 1
"""Of the rules in this file, `truth` and `accuracy`; part of every key, so that a change of them judges anew."""

LOOKS = 2  # progress lines after which an attempt that is untrue is not worth finishing
EXCERPT = 5  # lines of the user's code around the frame, before and after
MAX_MESSAGE = 2_000


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
            reports[rank] = {**(report or {}), "host": start["host"]}
    return truth.check(
        reports,
        cell.layout,
        cell.backend.framework,
        cell.accelerator.name,
        cell.accelerator.owns,
        cell.backend.compiles,
        truth.units_per_step(seen.of("progress", seen.reporter)),
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
    died = _death(seen, root)
    if died is not None and seen.ended_by != "untrue":
        return judged("fail", died)
    if isinstance(known.problem, Finding) and lines:
        return judged("fail", _found(known.problem))
    if wrong is not None:
        return judged("fail", _found(wrong))
    if not lines:
        printed = _silent(seen)
        if printed:
            return judged("error", reason=printed)
        return judged("fail", _found(Finding("no-progress", "it ended cleanly without one progress line")))
    absent = accuracy.missing(lines, evaluation, cell.reference, steps, log_every)
    if absent is not None:
        return judged("fail", _found(absent))
    if isinstance(known.problem, Unseen):
        return judged("error", reason=known.problem.message)
    if cell.reference is not None and limit is None:
        return judged(
            "error",
            reason=f"its matrix products ran at precision '{precision}', for which workload.yaml has no tolerance"
            if precision
            else "the precision of its matrix products could not be seen",
        )
    return judged("pass")


def _found(finding: Finding) -> Failure:
    return Failure(
        cause=finding.cause,
        message=finding.message,
        signature=failures.signature(finding.cause, finding.message, None),
    )


def _silent(seen: Observation) -> str | None:
    """Why no progress was seen although a log holds some: a process that nobody watched printed it."""
    from matrix.inside.worker import read_pairs

    for path in seen.logs.values():
        with path.open("rb") as file:
            for line in file:
                if {"step", "loss"} <= read_pairs(line[:65536]).keys():
                    return (
                        "progress was printed, but not through the script's own sys.stdout or sys.stderr "
                        "(by a child process or a C library): what it did could not be observed"
                    )
    return None


def _death(seen: Observation, root: str) -> Failure | None:
    """The failure of an attempt that did not end by itself with exit code 0."""
    raised = sorted(
        ((event["time"], rank, event) for rank in seen.events for event in seen.of("exception", rank)),
        key=lambda each: each[:2],
    )
    codes = rank_codes(seen)
    killed = {rank: code for rank, code in codes.items() if code < 0}
    if not codes and seen.code is not None and seen.code < 0:
        killed = {0: seen.code}
    # Of ranks the first to fail counts; one that the system killed could not tell when, but the others then followed.
    first = min((rank for rank in killed if -killed[rank] not in (signal.SIGTERM,)), default=None)
    if first is not None and seen.ended_by is None:
        return _signalled(seen, first, -killed[first], raised)
    if raised:
        return _exception(raised, root)
    if seen.ended_by in ("timeout", "hang"):
        return _stuck(seen)
    if seen.code:
        exits = {rank: event["code"] for rank in seen.events if (event := seen.last("exit", rank)) and event["code"]}
        rank = min(exits, default=None)
        code = codes.get(rank, exits[rank]) if rank is not None else seen.code
        if not seen.events:
            return _never_started(seen)
        return _simple("exit", f"exit code {code}, without an exception", rank)
    return None


def _simple(cause: str, message: str, rank: int | None = None, **more: Any) -> Failure:
    return Failure(cause=cause, message=message, rank=rank, signature=failures.signature(cause, message, None), **more)


def _signalled(seen: Observation, rank: int, number: int, raised: list[tuple[float, int, Event]]) -> Failure:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    followers = {str(other): _headline(event) for _, other, event in raised}
    native = _crash_text(seen, rank)
    if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP):
        return _simple("rank-died", f"rank {rank} was killed ({name})", rank, followers=followers)
    return _simple("crash", f"rank {rank} was ended by {name}", rank, followers=followers, traceback=native)


def _crash_text(seen: Observation, rank: int) -> str | None:
    log = seen.logs.get(str(rank))
    if log is None:
        return None
    text = log.with_suffix(".crash")
    return text.read_text("utf-8", "replace")[-20_000:] if text.exists() else None


def _headline(event: Event) -> str:
    link = event["chain"][0]
    name = link["type"].removeprefix("builtins.")
    return f"{name}: {link['message']}".strip().splitlines()[0][:MAX_MESSAGE]


def _exception(raised: list[tuple[float, int, Event]], root: str) -> Failure:
    _, rank, event = raised[0]
    chain = event["chain"]
    cause = failures.recognise(chain)
    frame = failures.user_frame(chain, root)
    innermost = chain[-1]["message"] or chain[-1]["type"]
    place = f"{Path(frame[0]).relative_to(root).as_posix()}:{frame[1]}" if frame else None
    message = f"{chain[0]['type']}: {chain[0]['message']}".strip()
    return Failure(
        cause=cause,
        message=message[:MAX_MESSAGE],
        signature=failures.signature(cause, innermost, place),
        rank=rank,
        frame=place,
        excerpt=_excerpt(*frame) if frame else [],
        traceback=event["traceback"],
        followers={str(other): _headline(each) for _, other, each in raised[1:]},
    )


def _excerpt(file: str, line: int) -> list[tuple[int, str]]:
    try:
        text = Path(file).read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    first = max(1, line - EXCERPT)
    return [(number, text[number - 1][:500]) for number in range(first, min(len(text), line + EXCERPT) + 1)]


def _stuck(seen: Observation) -> Failure:
    lines = seen.of("progress", seen.reporter)
    last = f"the last line was step {lines[-1]['step']:g}" if lines else "there was no progress line at all"
    if seen.ended_by == "timeout":
        return _simple("timeout", f"did not end within its time limit; {last}", stacks=seen.stacks)
    return _simple("hang", f"nothing was reported for longer than 'no_progress' allows; {last}", stacks=seen.stacks)


def _never_started(seen: Observation) -> Failure:
    """The command ended before any process of it ran the script: the launcher itself failed."""
    log = seen.logs.get("launcher")
    text = log.read_text("utf-8", "replace") if log else ""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    said = lines[-1] if lines else f"exit code {seen.code}"
    cause = failures.recognise([{"type": "launcher", "message": text[-20_000:]}]) if text else "exit"
    cause = "exit" if cause == "exception" else cause
    return _simple(cause, f"the launcher ended before the script began: {said}", traceback=text[-20_000:] or None)
