"""From a cell to its attempts: the baseline first, then the ports that serve it, the nearest first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from matrix import accuracy, changes, judge
from matrix.attempt import Context, Phase, blank, perform, unavailable
from matrix.evidence import stage
from matrix.failures import CAUSES, signature
from matrix.failures.wordings import CACHED
from matrix.journal import AttemptRecord, Failure
from matrix.plan import Cell
from matrix.workload import Source

RETRIES = 1  # of an attempt that failed for a cause which may be the machine's
MENDED = 10  # retries of an attempt, each after a damaged file was removed


def obstacle(context: Context, cell: Cell) -> str | None:
    """Why nothing of the cell can be executed here, positively known; None when it has to be tried."""
    layout, accelerator = cell.layout, cell.accelerator
    if cell.implementation is None:
        return f"no implementation: {cell.workload.name} has no scripts for {cell.backend.name}"
    if cell.backend.drives and accelerator.name not in cell.backend.drives:
        return f"{cell.backend.name} drives {', '.join(cell.backend.drives)}, not {accelerator.name}"
    absent = accelerator.absent()
    if absent:
        return absent
    interpreter = context.interpreters[cell.backend.name]
    if interpreter.absent:
        return interpreter.absent
    if layout.nodes > 1:
        return f"the layout has {layout.nodes} nodes, and there is one host"
    count = accelerator.count()
    if count is not None and count < layout.devices:
        return f"the layout needs {layout.devices} {accelerator.name} devices, this machine has {count}"
    return None


def sources(cell: Cell) -> list[Source]:
    """The baseline, then the ports that serve the cell, those with the fewest changed lines first."""
    baseline, ports = cell.sources()
    if baseline is None:
        return []

    def size(port: Source) -> int:
        found = changes.count(baseline.file, port.file)
        return found.added + found.deleted

    return [baseline, *sorted(ports, key=size)]


def correctness(context: Context, cell: Cell) -> Iterator[AttemptRecord]:
    """Attempt the cell's sources until one passes; yields what was done now, not what `context.prior` holds."""
    reason = obstacle(context, cell)
    if reason is not None:
        if cell.accelerator.absent():
            yield from _absent(context, cell, reason)
        else:
            yield unavailable(context, cell, reason)
        return
    for source in sources(cell):
        key = blank(context, cell, source)["key"]
        known = [a for a in context.prior if a.key == key and a.outcome in ("pass", "fail")]
        if not known or judge.decisive(known).outcome == "pass":
            for attempt in repeated(context, cell, source, known):
                known.append(attempt)
                yield attempt
        if judge.decisive(known).outcome == "fail":
            continue
        return  # passed; or the tool itself failed, and a port would only hide that


def _absent(context: Context, cell: Cell, reason: str) -> Iterator[AttemptRecord]:
    """What is shown without the accelerator; a source that was edited since it was executed is told by its key."""
    keys = {source.name: blank(context, cell, source)["key"] for source in sources(cell)}
    shown: Iterable[AttemptRecord] = stage.attempts(context, cell, sources(cell), reason)
    executed = [a for a in context.prior if a.cell == cell.id and a.evidence == "executed" and a.source in keys]
    if any(a.phase == "correctness" and a.key != keys[a.source or ""] for a in judge.current(executed)):
        shown = itertools.chain([unavailable(context, cell, reason)], shown)
    for attempt in shown:
        yield attempt.model_copy(update={"keys": keys})


def repeated(
    context: Context, cell: Cell, source: Source, known: Sequence[AttemptRecord] = ()
) -> Iterator[AttemptRecord]:
    """One attempt, or as many as the definition's `repeats` asks for; what failed for the machine's sake, again.

    After a wrong result it is run once more: two that differ are nondeterministic.

    Args:
        known: earlier attempts of the same key, none of which failed: they need not be repeated.
    """
    results = [attempt for attempt in known if attempt.outcome == "pass"]
    while len(results) < cell.run.repeats:
        *failed, attempt = _tried(context, cell, source, "correctness")
        yield from failed
        results.append(attempt)
        if len(results) > 1 and (difference := disagreement(cell, results)):
            cause = "nondeterministic"
            failure = Failure(cause=cause, message=difference, signature=signature(cause, difference, None))
            yield attempt.model_copy(update={"outcome": "fail", "failure": failure})
            return
        yield attempt
        if attempt.outcome != "pass" and not (attempt.failure and attempt.failure.cause == "wrong-result"):
            return


def _tried(context: Context, cell: Cell, source: Source, phase: Phase) -> list[AttemptRecord]:
    """Attempts of which all but the last failed for the machine's sake."""
    attempts = [perform(context, cell, source, phase)]
    while (failure := attempts[-1].failure) is not None and CAUSES[failure.cause].infrastructure:
        if len(attempts) > (MENDED if _mended(failure) else RETRIES):
            break
        attempts.append(perform(context, cell, source, phase))
    return attempts


def _mended(failure: Failure) -> bool:
    """Whether an unfinished library was removed from Inductor's cache, where it would fail every later compilation."""
    named = re.search(CACHED, failure.message) if failure.cause == "damaged-cache" else None
    if named is None:
        return False
    try:
        Path(named["cached"]).unlink()
    except OSError:  # another cell removed it, or it is another user's
        return False
    return True


def disagreement(cell: Cell, results: Sequence[AttemptRecord]) -> str | None:
    """How the last of some attempts of one source, with one seed, differs from the first by more than rounding."""
    first, last = dict(results[0].metrics.loss), dict(results[-1].metrics.loss)
    evaluations = results[0].metrics.eval, results[-1].metrics.eval
    reference = cell.reference
    precision = results[-1].precision
    limit = (accuracy.tolerance(reference, precision) if reference and precision else None) or 0.0
    pairs = [(f"step {step}: loss", first[step], last[step]) for step in sorted(first.keys() & last.keys())]
    if evaluations[0] is not None and evaluations[1] is not None:
        pairs.append(("eval", evaluations[0], evaluations[1]))
    for name, one, other in pairs:
        off = accuracy.deviation(other, one)
        if off > limit:
            return (
                f"{name} {one:.9g} in run 1, {other:.9g} in run {len(results)}: "
                f"{off:.2g} relative, tolerance {limit:.2g}"
            )
    return None


def passing(cell: Cell, attempts: Sequence[AttemptRecord]) -> Source | None:
    """The source by which the cell passed, if it did."""
    tried = [attempt for attempt in attempts if attempt.phase == "correctness"]
    found = judge.judge([cell.planned()], tried)[0]
    if found.verdict not in ("as-is", "ported") or found.attempt is None:
        return None
    return next((source for source in sources(cell) if source.name == found.attempt.source), None)


def measured(context: Context, cell: Cell, source: Source, attempts: Sequence[AttemptRecord]) -> int:
    """How many processes of the measurement there are already: all that there shall be when one of them failed."""
    phase: Phase = "measurement"
    key = blank(context, cell, source, phase)["key"]
    known = [a.outcome for a in attempts if a.key == key and a.phase == phase]
    return cell.run.measure.processes if known[-1:] == ["fail"] else known.count("pass")


def measure(context: Context, cell: Cell, source: Source) -> list[AttemptRecord]:
    """One process of the measurement, after those that failed for the machine's sake; nothing may run beside it."""
    return _tried(context, cell, source, "measurement")
