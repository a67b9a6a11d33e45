"""The section of a cell as a list of simple blocks, which the template and the script draw alike."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from matrix.journal import AttemptRecord, Compiled, Failure, ProofRecord, Reference
from reports import targets, words
from reports.html import charts
from reports.html.logs import LogReader
from reports.merge import Row
from reports.metrics import Sample, Speed
from reports.overview import failed_attempt
from reports.text import clipped, count, one_line, visible
from reports.units import lines as changed_lines
from reports.units import memory, moment, number, seconds

Block = tuple[Any, ...]
"""A kind (see `blocks.html.j2`), then what it holds: texts, or lists of texts and numbers, all in visible form."""
Group = tuple[str, list[Block]]
"""A heading and its blocks."""


@dataclass
class Detail:
    """How much of a cell goes into the page.

    Attributes:
        lean: for reports of very many cells: no logs and no drawings of cells that run, shorter tracebacks.
        logs: reads the logs.
    """

    lean: bool = False
    logs: LogReader = field(default_factory=LogReader)
    shared: dict[int, tuple[int, Block]] = field(default_factory=dict)
    """Blocks that several cells may hold, by the identity of the block: its number, and the block."""
    _known: dict[object, Block] = field(default_factory=dict)

    @property
    def traceback(self) -> int:
        return 8_000 if self.lean else 64_000

    def diff(self, old: str, before: str, new: str, after: str) -> Block:
        """The difference of two sources, by name and text; worked out once for all the cells that share it."""
        return self._share((old, before, new, after), lambda: _diff(old, new, before, after))

    def environment(self, attempt: AttemptRecord | None) -> list[Block]:
        """The environment of an attempt; cells of one run mostly share it."""
        if attempt is None or not attempt.environment:
            return []
        return [self._share(repr(attempt.environment), lambda: _environment(attempt.environment))]

    def _share(self, key: object, make: Callable[[], Block]) -> Block:
        if key not in self._known:
            block = self._known[key] = make()
            self.shared[id(block)] = len(self.shared), block
        return self._known[key]


def section(row: Row, detail: Detail) -> list[Group]:
    """The groups of a cell, what a reader needs first on top."""
    groups = [
        ("Verdict", list(_verdict(row))),
        *_failures(row, detail),
        ("Reproduce", list(_reproduce(row))),
        ("Loss against the reference", list(_loss(row, detail))),
        ("Throughput", list(_throughput(row))),
        ("Without the accelerator", list(_targets(row))),
        ("Devices", list(_devices(row))),
        ("Required changes", list(_changes(row, detail))),
        ("Logs", list(_logs(row, detail))),
        ("Attempts", list(_attempts(row))),
        ("Environment", detail.environment(row.verdict.attempt)),
    ]
    return [(heading, blocks) for heading, blocks in groups if blocks]


def _pairs(*pairs: tuple[str, object]) -> Block:
    shown = [(name, value) for name, value in pairs if value not in (None, "", {}, [])]
    return "pairs", [[one_line(name, 80), one_line(_in_words(name, value), 2000)] for name, value in shown]


def _verdict(row: Row) -> Iterator[Block]:
    verdict = row.verdict
    word = words.VERDICTS[verdict.verdict]
    shown_below = failed_attempt(verdict) is not None and verdict.verdict != "ported"
    yield "text", f"{word.symbol} {word.label}" + ("" if shown_below else f": {one_line(verdict.why, 600)}")
    standing = words.standing(verdict)
    if standing:
        yield "text", f"{'Not as expected: ' if row.unexpected else ''}{standing}"
    expected = verdict.cell.expectation
    if expected and expected.link:
        yield "link", "the known failure", expected.link
    attempt = verdict.attempt
    yield _pairs(
        ("Machine", row.machine),
        ("Evidence", words.EVIDENCE.get(verdict.evidence, verdict.evidence)),
        ("Source", f"{attempt.source} ({attempt.role})" if attempt and attempt.source else None),
        ("Precision of matmul", attempt.precision if attempt else None),
        ("Decided", moment(attempt.started) if attempt and attempt.started else None),
    )
    if row.elsewhere:
        names = sorted({f"{a.machine}: {a.reason or a.evidence}" for a in row.elsewhere})
        yield "text", one_line("Other machines had less to say: " + "; ".join(names), 600)


def _failures(row: Row, detail: Detail) -> Iterator[Group]:
    attempt = failed_attempt(row.verdict)
    if attempt is None:
        return
    if attempt.failure is None:
        yield "The tool's own error", [("pre", "reason", clipped(attempt.reason or "", detail.traceback))]
        return
    heading = "What failed" if row.verdict.verdict != "ported" else "Why the baseline does not pass"
    yield heading, list(_failure(attempt.failure, detail))
    if row.verdict.verdict == "broken" and attempt.role == "port":
        for other in row.verdict.current:
            if other.role == "baseline" and other.outcome == "fail" and other.failure:
                said = f"{other.failure.cause}: {one_line(other.failure.message)}"
                where = f" ({one_line(other.failure.frame)})" if other.failure.frame else ""
                yield "Before it, the baseline", [("text", said + where)]
                break


def _failure(failure: Failure, detail: Detail) -> Iterator[Block]:
    cause = words.cause(failure.cause)
    rank = f", first on rank {failure.rank}" if failure.rank is not None else ""
    yield "text", visible(f"{failure.cause}{rank}" + (f": {cause.words}" if cause.words else ""))
    yield "pre", "", clipped(failure.message, 4_000)
    if cause.advice:
        yield "advice", visible(cause.advice)
    if failure.excerpt or failure.frame:
        place, _, line = (failure.frame or "").rpartition(":")
        lines = [[n, visible(text)[:400], str(n) == line] for n, text in failure.excerpt[:41]]
        yield "code", one_line(failure.frame or place), lines
    if failure.traceback:
        yield "fold", f"Traceback ({count(len(failure.traceback), 'character')})", _clip(failure.traceback, detail)
    for rank_name, stack in list(failure.stacks.items())[:64]:
        yield "fold", one_line(f"Stack of rank {rank_name}"), _clip(stack, detail)
    for rank_name, said in list(failure.followers.items())[:64]:
        yield "fold", one_line(f"Rank {rank_name} followed"), _clip(said, detail)


def _clip(text: str, detail: Detail) -> str:
    return clipped(text, detail.traceback)


def _reproduce(row: Row) -> Iterator[Block]:
    attempt = row.verdict.attempt
    if attempt and attempt.reproduce:
        yield "command", clipped(attempt.reproduce, 8_000)


def _reference(row: Row, attempt: AttemptRecord) -> Reference | None:
    references = row.decided_in.run.references
    workload = attempt.axes.get("workload", "")
    return references.get(f"{workload}/{attempt.implementation}") or references.get(workload)


def _loss(row: Row, detail: Detail) -> Iterator[Block]:
    attempt = row.verdict.attempt
    if attempt is None or not attempt.metrics.loss:
        return
    metrics, reference = attempt.metrics, _reference(row, attempt)
    tolerance = metrics.tolerance
    if tolerance is None and reference:
        tolerance = reference.tolerance.get(attempt.precision or "")
    wanted = reference.loss if reference else []
    if metrics.deviation is not None:
        limit = f", tolerance {tolerance:.0e} for {attempt.precision or 'its precision'}" if tolerance else ""
        yield "text", visible(f"Largest relative deviation {metrics.deviation:.2e}{limit}.")
    elif not wanted:
        yield "text", "The workload has no reference."
    if metrics.eval is not None:
        known = _evaluation(reference, metrics.loss[-1][0]) if reference else None
        yield "text", f"Evaluation {metrics.eval:.6g}" + (f", reference {known:.6g}." if known is not None else ".")
    if detail.lean and row.verdict.verdict in ("as-is", "ported"):
        return
    drawings = [charts.loss(metrics.loss, wanted, tolerance), charts.deviation(metrics.loss, wanted, tolerance)]
    captions = ["Loss, and dashed its reference", "Relative deviation; the band is within tolerance"]
    for caption, drawing in zip(captions, drawings, strict=True):
        if drawing:
            yield "svg", caption, drawing


def _evaluation(reference: Reference, step: int) -> float | None:
    """The reference's evaluation after `step`, if it has one there."""
    last = reference.eval if reference.loss and step == reference.loss[-1][0] else None
    return reference.evaluations.get(step, last)


def _throughput(row: Row) -> Iterator[Block]:
    measured = row.speed
    if measured is None:
        return
    sample = measured.throughput
    if sample:
        yield "text", visible(f"{number(sample.median)} {measured.unit}{_spread(sample)}")
        if sample.n > 1:
            yield "svg", "Each dot is one process", charts.processes(measured.values, sample)
    else:
        yield "text", "Too few steady steps for a throughput."
    if not measured.comparable:
        yield "text", "Not comparable: several devices are one piece of hardware here."
    yield _pairs(*_costs(measured))


def _spread(sample: Sample) -> str:
    if sample.spread == "single":
        return " (one process, so no interval)"
    kind = "95 % interval of the median" if sample.spread == "interval" else "smallest to largest"
    return f", {kind} {number(sample.low)} to {number(sample.high)}, n = {sample.n} processes"


def _costs(measured: Speed) -> Iterator[tuple[str, object]]:
    yield "Step", seconds(measured.step_s.median) if measured.step_s else None
    warm, known = measured.warm
    state = f" (compiled graphs from the cache in {warm} of {known} processes)" if known else ""
    yield "Start-up", seconds(measured.startup_s.median) + state if measured.startup_s else None
    yield "Peak memory", memory(measured.peak_memory_bytes) if measured.peak_memory_bytes else None


def _targets(row: Row) -> Iterator[Block]:
    """What the compilers of absent chips said, and what they made of each function."""
    for attempt in targets.shown(row)[:32]:
        target, compiled = attempt.target, attempt.compiled
        assert target is not None
        outcome = attempt.evidence if attempt.outcome == "pass" else attempt.outcome
        said = attempt.failure.message if attempt.failure else attempt.reason
        yield "text", one_line(f"{target.about}: {outcome}" + (f" ({said})" if said else ""), 400)
        yield _pairs(
            ("Source", attempt.source),
            ("Chip", target.kind),
            ("Its memory", memory(target.memory_bytes) if target.memory_bytes else None),
            ("Compiler", target.compiler),
            ("Recompiled", f"{count(compiled.recompiles, 'time')}, for other shapes" if compiled else None),
        )
        if compiled and compiled.functions:
            yield _functions(compiled, target.memory_bytes)
        for note in compiled.notes[:32] if compiled else ():
            yield "text", one_line(note, 400)


def _functions(compiled: Compiled, room: int | None) -> Block:
    """A line for each compiled program; figures are those of one device."""
    head = ["function", "calls", "devices", "peak memory", "arguments", "collectives", "FLOPs", "bytes", "compiled in"]
    lines = []
    for each in compiled.functions[:100]:
        share = f" ({each.peak_bytes / room:.1%})" if each.peak_bytes and room else ""
        once = " *" if each.scans_counted_once and each.flops is not None else ""
        took = seconds(each.compile_s) if each.compile_s else ""
        lines.append(
            [
                one_line(each.name, 80),
                str(each.calls),
                str(each.devices),
                memory(each.peak_bytes) + share if each.peak_bytes is not None else "",
                memory(each.argument_bytes) if each.argument_bytes is not None else "",
                one_line(", ".join(f"{n} {name}" for name, n in each.collectives.items()), 160),
                (number(each.flops) if each.flops is not None else "") + once,
                (memory(each.bytes) if each.bytes is not None else "") + once,
                f"{took} (from the cache)" if each.cached and took else took,
            ]
        )
    if any(each.scans_counted_once for each in compiled.functions):
        head[6:8] = ["FLOPs (* bodies of loops counted once)", "bytes (*)"]
    return "table", head, lines


def _devices(row: Row) -> Iterator[Block]:
    attempt = row.verdict.attempt
    if attempt is None or not (attempt.devices.kind or attempt.devices.detail):
        return
    devices = attempt.devices
    seen = "not seen" if devices.used is None else f"{devices.used} of {devices.expected}"
    yield _pairs(("Kind", devices.kind), ("Seen at work", seen))
    reports = {rank: seen for rank, seen in list(devices.detail.items())[:64] if isinstance(seen, dict)}
    table = _table({"rank": rank, **device} for rank, seen in reports.items() for device in _devices_of(seen))
    if table:
        yield table
    if reports:
        yield _by_rank(reports)
    rest = [(name, value) for name, value in devices.detail.items() if name not in reports]
    if rest:
        yield _pairs(*rest[:24])


def _devices_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    found = report.get("devices")
    return [device for device in found if isinstance(device, dict)][:64] if isinstance(found, list) else []


def _table(entries: Iterable[dict[str, Any]]) -> Block | None:
    """A table of what some dicts say, a column per key; lists of dicts are left out, they have tables of their own."""
    shown = [
        {k: v for k, v in entry.items() if v not in (None, "", [], {}) and not (isinstance(v, list) and _nested(v))}
        for entry in entries
    ][:256]
    head = list(dict.fromkeys(key for entry in shown for key in entry))[:16]
    if not shown:
        return None
    lines = [[one_line(_in_words(key, entry.get(key, "")), 120) for key in head] for entry in shown]
    return "table", [one_line(key.replace("_", " "), 40) for key in head], lines


def _by_rank(reports: dict[str, dict[str, Any]]) -> Block:
    """What the ranks report beside their devices: a line for each thing, a column for each of the first ranks."""
    ranks = list(reports)[:16]
    names = [name for name in dict.fromkeys(key for rank in ranks for key in reports[rank]) if name != "devices"]
    lines = []
    for name in names[:32]:
        values = [one_line(_in_words(name, reports[rank].get(name, "")), 120) for rank in ranks]
        if any(values):
            lines.append([one_line(name.replace("_", " "), 40), *values])
    return "table", ["", *(one_line(f"rank {rank}", 20) for rank in ranks)], lines


def _nested(values: list[Any]) -> bool:
    return any(isinstance(value, dict) for value in values)


def _in_words(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_in_words(f'{key}.{name}', each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(_in_words(key, each) for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and "bytes" in key:
        return memory(value)
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _changes(row: Row, detail: Detail) -> Iterator[Block]:
    attempt = row.verdict.attempt
    if attempt is None or attempt.role != "port" or not attempt.source:
        return
    if attempt.changes:
        changes = attempt.changes
        summary = f"{changed_lines(changes.added, changes.deleted)} in {count(changes.hunks, 'hunk')}"
        yield "text", f"{summary}, comments and formatting not counted."
    if row.proof:
        yield from _proof(row.proof)
    workload = attempt.axes.get("workload", "")
    baseline = next((a.source for a in row.verdict.attempts if a.role == "baseline" and a.source), None)
    sources = row.decided_in.run.sources
    old, new = f"{workload}/{baseline}", f"{workload}/{attempt.source}"
    if baseline and old in sources and new in sources:
        yield detail.diff(old, sources[old], new, sources[new])


def _proof(proof: ProofRecord) -> Iterator[Block]:
    """Which hunks of the port its cell needs, by runs without them."""
    if not proof.hunks:
        yield "text", "Which of these changes are needed was looked for, but not to the end."
        return
    verdicts = Counter(hunk.verdict for hunk in proof.hunks)
    counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
    smallest = proof.minimal_changes
    rest = f" The smallest port that passes: {changed_lines(smallest.added, smallest.deleted)}." if smallest else ""
    yield "text", f"Tried without each of its hunks: {counts}.{rest}"
    table = [
        [
            str(hunk.id),
            f"{hunk.new[0]} to {hunk.new[1]}" if hunk.new[1] > hunk.new[0] else str(hunk.new[0]),
            changed_lines(hunk.added, hunk.deleted),
            ", ".join(one_line(f"{name.replace('_', ' ')} {n}", 40) for name, n in hunk.categories.items()),
            hunk.verdict,
            one_line(hunk.why, 200),
        ]
        for hunk in proof.hunks[:100]
    ]
    yield "table", ["hunk", "lines of the port", "changed", "what", "verdict", "why"], table


def _diff(old: str, new: str, before: str, after: str) -> Block:
    if len(before) + len(after) > 400_000:
        return "text", "The sources are too large to compare here."
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), old, new, lineterm="", n=2)
    return "diff", visible(f"{old} → {new}"), clipped("\n".join(lines), 40_000).split("\n")


def _logs(row: Row, detail: Detail) -> Iterator[Block]:
    attempt = failed_attempt(row.verdict) or row.verdict.attempt
    if attempt is None or (detail.lean and row.verdict.verdict in ("as-is", "ported")):
        return
    folder = row.decided_in.path.parent
    for rank, name in list(attempt.logs.items())[:64]:
        yield "fold", one_line(f"Rank {rank}: {name}"), detail.logs.tail(folder, name)
    if len(attempt.logs) > 64:
        yield "text", f"{len(attempt.logs) - 64} more ranks are left out here."


def _attempts(row: Row) -> Iterator[Block]:
    if not row.verdict.attempts:
        return
    counted = {id(attempt) for attempt in row.verdict.current}
    shown = row.verdict.attempts[:100]
    head = ["#", "phase", "source", "outcome", "evidence", "why", "throughput", "start-up", "took", "started"]
    table = []
    for attempt in shown:
        failure, rate = attempt.failure, attempt.metrics.throughput
        outcome = attempt.outcome + ("" if id(attempt) in counted else " (of an earlier version)")
        table.append(
            [
                str(attempt.attempt),
                attempt.phase,
                one_line(attempt.source or "", 80),
                outcome,
                attempt.evidence,
                one_line(failure.cause if failure else attempt.reason or "", 120),
                visible(f"{number(rate.median)} {rate.unit}") if rate else "",
                seconds(attempt.metrics.startup_s) if attempt.metrics.startup_s is not None else "",
                seconds(attempt.duration_s) if attempt.duration_s is not None else "",
                one_line(moment(attempt.started), 40),
            ]
        )
    yield "table", head, table
    if len(row.verdict.attempts) > len(shown):
        yield "text", f"{len(row.verdict.attempts) - len(shown)} more attempts are left out here."


def _environment(environment: dict[str, Any]) -> Block:
    values = dict(environment)
    packages = values.pop("packages", None)
    if isinstance(packages, dict):
        values["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items())
    variables = values.pop("variables", None)
    if isinstance(variables, dict):
        values["variables"] = " ".join(f"{name}={value}" for name, value in variables.items())
    if isinstance(values.get("memory_bytes"), int):
        values["memory"] = memory(values.pop("memory_bytes"))
    return _pairs(*((name.replace("_", " "), value) for name, value in list(values.items())[:40]))
