"""Proof by removal: a port that passed, run again without each of its hunks, tells what its cell really needs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from matrix import changes, judge, keys, runner
from matrix.attempt import Context, alone, blank, now, perform
from matrix.changes import Comparison, removal, script
from matrix.changes.removal import NONE, Hunks, Settled
from matrix.changes.wording import described, lines, listed
from matrix.errors import UsageError
from matrix.journal import AttemptRecord, Changes, Failure, HunkProof, Pace, ProofRecord, Trial
from matrix.plan import Cell
from matrix.workload import Source

VERSION = 2
"""Changes when a hunk's verdict would come out otherwise from the same runs."""
PROCESSES = 5
"""Of each side, to call a difference in speed one: with fewer, chance looks as large too often."""
FEW = 3
"""Of each side, after which a port that is not slower by the medians is not measured any further."""
PATIENCE = 10
"""A port without a hunk that takes so many times as long as the whole port did is taken to hang,"""
PATIENCE_S = 30.0
"""but not sooner than after this time: a busy machine makes short runs long."""
UNSTEADY = frozenset({"crash", "rank-died", "hang", "timeout", "out-of-memory-host", "network", "rendezvous"})
"""Causes that can be chance: such a failure counts when a second run fails too; else its hunk is unproven."""


class OutOfTime(Exception):
    """The budget of the run is used up."""


@dataclass(frozen=True)
class Ported:
    """A cell that a port passed, the attempt in which it did, and the last one in which the baseline did not."""

    cell: Cell
    source: Source
    passed: AttemptRecord
    failed: AttemptRecord | None


def ported(cells: Iterable[Cell], attempts: Sequence[AttemptRecord]) -> list[Ported]:
    """The cells that a port passed."""
    found = []
    for cell in cells:
        mine = [attempt for attempt in attempts if attempt.cell == cell.id]
        verdict = judge.judge([cell.planned()], mine)[0]
        if verdict.verdict == "ported" and verdict.attempt is not None:
            source = next((each for each in cell.sources()[1] if each.name == verdict.attempt.source), None)
            failed = [a for a in verdict.current if a.role == "baseline" and a.outcome == "fail"]
            if source is not None:
                found.append(Ported(cell, source, verdict.attempt, failed[-1] if failed else None))
    return found


@dataclass
class Prover:
    """Proves ports in their cells.

    Attributes:
        context: of the run; what is run for a proof lies under `proof` in its folder.
        record: puts a record in the journal. One is written after each run, so that a resumed proof repeats none.
        say: shows a line of progress.
        late: whether nothing more may be started.
        measure: whether to measure if the cell is slower without a hunk that it passes without.
    """

    context: Context
    record: Callable[[ProofRecord], None]
    say: Callable[[str], None]
    late: Callable[[], bool] = lambda: False
    measure: bool = True

    def prove(self, ported: Ported, earlier: Iterable[ProofRecord] = ()) -> ProofRecord:
        """Find out which hunks of a port its cell needs.

        Args:
            ported: the cell and the port.
            earlier: proofs of the same run; what they know of the same key is not run again.

        Returns:
            The record; not complete when the time was up, or when the port cannot be compared with its baseline.
        """
        proof = _Proof(self, ported)
        for known in earlier:
            if known.key == proof.key:
                if known.complete:
                    return known
                proof.trials, proof.paces = list(known.trials), list(known.paces)
        return proof.run()


class _Proof:
    def __init__(self, prover: Prover, ported: Ported):
        cell, source = ported.cell, ported.source
        baseline = cell.sources()[0]
        assert baseline is not None
        self.prover = prover
        self.context = dataclasses.replace(prover.context, prior=(), live=False, beside=1)
        self.cell, self.source, self.baseline = cell, source, baseline
        self.passed, self.failed = ported.passed, ported.failed
        self.key = proof_key(prover.context, cell, source, prover.measure)
        self.started = now()
        self.trials: list[Trial] = []
        self.paces: list[Pace] = []
        self.told = 0
        self.folder = prover.context.folder / "proof" / cell.id / _plain(source.name)

    def run(self) -> ProofRecord:
        say = self.prover.say
        try:
            comparison = changes.compare_files(self.baseline.file, self.source.file)
        except UsageError as error:
            say(f"{self.cell.id} {self.source.name}: not proven: {error}")
            return self.as_record(None, [])
        count = len(comparison.hunks)
        say(f"{self.cell.id} {self.source.name}: {count} {'hunk' if count == 1 else 'hunks'}, one run for each")
        everything = frozenset(hunk.id for hunk in comparison.hunks)
        known = {frozenset(trial.without): trial for trial in self.trials}
        known[NONE] = Trial(
            without=[], outcome="pass", reproduce=self.passed.reproduce, settled=self.passed.metrics.settled
        )
        if everything and self.failed is not None and self.baseline.launch == self.source.launch:
            # Without all of its hunks a port is its baseline; but under another launcher that has not been run.
            known.setdefault(
                everything,
                Trial(
                    without=sorted(everything),
                    outcome="fail",
                    failure=_brief(self.failed.failure),
                    reproduce=self.failed.reproduce,
                ),
            )

        def told(settled: Settled) -> None:
            self.told += 1
            hunk = described(comparison, settled)
            say(f"[{min(self.told, count)}/{count}] hunk {lines(hunk)}: {hunk.verdict}: {hunk.why}")

        search = removal.Search(
            comparison,
            run=lambda taken: self.attempt(comparison, taken),
            pace=lambda base, taken: self.pace(comparison, base, taken),
            known=known,
            told=told,
        )
        try:
            settled = search.settled()
        except OutOfTime:
            say(f"{self.cell.id} {self.source.name}: the budget is used up: --resume goes on with the proof")
            return self.as_record(comparison, [])
        return self.finish(comparison, settled, search.removed)

    def finish(self, comparison: Comparison, settled: Sequence[Settled], removed: Hunks) -> ProofRecord:
        """Write the smallest port that passes as a patch, and the record."""
        text = changes.without(comparison, removed)
        file = self.folder / "minimal.patch"
        file.parent.mkdir(parents=True, exist_ok=True)
        difference = changes.patch(comparison.baseline, text, self.baseline.name)
        file.write_bytes(difference.encode(comparison.baseline.encoding.removesuffix("-sig"), "backslashreplace"))
        record = self.as_record(comparison, [described(comparison, each) for each in settled]).model_copy(
            update={
                "complete": True,
                "minimal": str(file.relative_to(self.prover.context.folder)),
                "minimal_changes": changes.compare_scripts(comparison.baseline, script.parse(text)).counts,
            }
        )
        self.prover.record(record)
        counts = {name: sum(each.verdict == name for each in settled) for name in ("required", "performance", "idle")}
        words = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        self.prover.say(f"{self.cell.id} {self.source.name}: {words or 'no hunks'}; {len(self.trials)} runs; {file}")
        return record

    def as_record(self, comparison: Comparison | None, hunks: Sequence[HunkProof]) -> ProofRecord:
        return ProofRecord(
            run=self.context.run,
            machine=self.context.machine,
            cell=self.cell.id,
            axes=dict(self.cell.axes),
            key=self.key,
            source=self.source.name,
            baseline=self.baseline.name,
            changes=comparison.counts if comparison else Changes(added=0, deleted=0, hunks=0),
            hunks=list(hunks),
            trials=self.trials,
            paces=self.paces,
            started=self.started,
        )

    def attempt(self, comparison: Comparison, taken: Hunks) -> Trial:
        """Run the port without some hunks, as the runner would, until it passes or fails."""
        if self.prover.late():
            raise OutOfTime
        text = changes.without(comparison, taken)
        if not script.parses(text):
            trial = Trial(without=sorted(taken), outcome="fail", reason="without it the script does not parse")
        else:
            cell, source, context = self.variant(comparison, taken)
            last = judge.decisive(list(runner.repeated(context, cell, source)))
            if last.failure is not None and last.failure.cause in UNSTEADY:
                again = judge.decisive(list(runner.repeated(context, cell, source)))
                if again.outcome == "pass":
                    words = f"fails in one of two runs: {last.failure.cause}: {last.failure.message}"
                    last = again.model_copy(update={"outcome": "error", "reason": words})
            trial = Trial(
                without=sorted(taken),
                outcome=last.outcome,
                failure=_brief(last.failure),
                reason=last.reason,
                reproduce=last.reproduce,
                duration_s=last.duration_s,
                settled=last.metrics.settled,
            )
        self.trials.append(trial)
        self.prover.record(self.as_record(comparison, []))
        return trial

    def variant(self, comparison: Comparison, taken: Hunks) -> tuple[Cell, Source, Context]:
        """The cell and the port in a workload folder of their own, which lasts: its commands can be repeated."""
        name = "-".join(["without", *map(str, sorted(taken))]) if taken else "whole"
        if len(name) > 100:
            name = f"without-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        folder = self.folder / name
        text = changes.without(comparison, taken)
        file = mirror(self.cell.workload.folder, folder, self.source.name)
        file.write_bytes(_encoded(text, comparison.port.encoding))
        limit = max(PATIENCE_S, PATIENCE * (self.passed.duration_s or PATIENCE_S))
        settings = self.cell.run.model_copy(
            update={
                "timeout": min(self.cell.run.timeout, limit),
                "no_progress": min(self.cell.run.no_progress, limit),
            }
        )
        workload = dataclasses.replace(self.cell.workload, folder=folder)
        cell = dataclasses.replace(self.cell, workload=workload, run=settings)
        context = dataclasses.replace(self.context, folder=self.context.folder / "proof")
        return cell, dataclasses.replace(self.source, file=file), context

    def pace(self, comparison: Comparison, base: Hunks, taken: Hunks) -> Pace | None:
        """Measure the port with and without some hunks, in processes that take turns."""
        if not self.prover.measure:
            return None
        for known in self.paces:
            if known.base == sorted(base) and known.without == sorted(taken):
                return known
        sides = [self.variant(comparison, base), self.variant(comparison, base | taken)]
        times: list[list[float]] = [[], []]
        wanted = max(PROCESSES, self.cell.run.measure.processes)
        self.prover.say(f"passes without hunk {listed(taken)}: measuring whether it is slower")
        with alone(self.prover.say):
            for turn in range(wanted):
                for side, (cell, source, context) in zip(times, sides, strict=True):
                    if self.prover.late():
                        raise OutOfTime
                    cell = dataclasses.replace(cell, run=self.cell.run)
                    step_s = perform(context, cell, source, "measurement").metrics.step_s
                    if step_s is not None:
                        side.append(step_s)
                if turn + 1 >= FEW and (not all(times) or _ratio(times) < 1 + removal.EFFECT):
                    break
        pace = Pace(base=sorted(base), without=sorted(taken), processes=min(map(len, times)))
        if all(times):
            from scipy.stats import mannwhitneyu  # here, since it takes a second that other uses need not wait

            p = float(mannwhitneyu(times[1], times[0], alternative="greater").pvalue)
            pace = pace.model_copy(update={"slowdown": _ratio(times), "p": p})
        self.paces.append(pace)
        self.prover.record(self.as_record(comparison, []))
        return pace


def proof_key(context: Context, cell: Cell, source: Source, measure: bool) -> str:
    """What decides how a proof comes out: all that decides the port's own attempts, and the baseline."""
    baseline = cell.sources()[0]
    assert baseline is not None
    facts = [blank(context, cell, source)["key"], keys.file_digest(baseline.file), str(VERSION), str(measure)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def mirror(workload: Path, folder: Path, name: str) -> Path:
    """A folder like a workload's in which one file can be another: everything else is a link to what is there.

    Returns:
        The path of that file, which is not there yet.
    """
    there, here = workload.resolve(), folder
    for part in PurePosixPath(name).parts:
        here.mkdir(parents=True, exist_ok=True)
        for entry in there.iterdir():
            link = here / entry.name
            if entry.name not in (part, "__pycache__") and not link.is_symlink():
                with contextlib.suppress(FileExistsError):
                    link.symlink_to(entry)
        there, here = there / part, here / part
    return here


def idle(proofs: Iterable[ProofRecord]) -> dict[tuple[str, str], list[HunkProof]]:
    """By workload and port, the hunks that were idle in every cell for which the port was proven."""
    found: dict[tuple[str, str], dict[int, list[HunkProof]]] = {}
    for proof in proofs:
        if proof.complete:
            port = found.setdefault((proof.axes.get("workload", ""), proof.source), {})
            for hunk in proof.hunks:
                port.setdefault(hunk.id, []).append(hunk)
    return {
        port: unneeded
        for port, hunks in found.items()
        if (unneeded := [each[0] for each in hunks.values() if all(hunk.verdict == "idle" for hunk in each)])
    }


def _brief(failure: Failure | None) -> Failure | None:
    """A failure without its long texts, which stay in the logs: a proof is written down again after each run."""
    return failure and failure.model_copy(update={"traceback": None, "stacks": {}, "followers": {}})


def _ratio(times: Sequence[Sequence[float]]) -> float:
    return statistics.median(times[1]) / statistics.median(times[0])


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


def _encoded(text: str, encoding: str) -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError:
        raise UsageError(f"baseline and port have different encodings, and {encoding} cannot hold both") from None
