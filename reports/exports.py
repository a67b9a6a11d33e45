"""Rows for other programs: `cells.csv` for spreadsheets, `junit.xml` for continuous integration."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO
from xml.sax.saxutils import escape, quoteattr

from reports import words
from reports.merge import Evidence, Row
from reports.metrics import Sample
from reports.text import clipped, one_line

# A spreadsheet takes a text that begins so for a formula (https://owasp.org/www-community/attacks/CSV_Injection);
# the full-width forms count as well in some locales.
_FORMULA = tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20")
_TRACEBACK_CHARACTERS = 20_000
_MAIN_AXES = ("workload", "backend", "accelerator", "layout")

Value = str | int | float | bool | None


def write_csv(evidence: Evidence, path: Path) -> None:
    """One line per cell and machine. Texts that a spreadsheet would run as a formula get a leading apostrophe."""
    axes = axis_names(evidence.rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        header: list[str] | None = None
        for row in evidence.rows:
            line = _csv_line(row, axes)
            if header is None:
                header = list(line)
                writer.writerow([safe(name) for name in header])
            writer.writerow([safe(value) for value in line.values()])


def axis_names(rows: Iterable[Row]) -> list[str]:
    """The axes of the rows: the four main ones, then the others in alphabetical order."""
    names = {name for row in rows for name in row.axes}
    return [name for name in _MAIN_AXES if name in names] + sorted(names.difference(_MAIN_AXES))


def _csv_line(row: Row, axes: list[str]) -> dict[str, Value]:
    verdict, attempt, measured = row.verdict, row.verdict.attempt, row.speed
    failure = attempt.failure if attempt else None
    metrics = attempt.metrics if attempt else None
    line: dict[str, Value] = {"cell": row.cell, "machine": row.machine}
    line |= {name: row.axes.get(name, "") for name in axes}
    line |= {
        "verdict": verdict.verdict,
        "evidence": verdict.evidence,
        "executed": str(verdict.executed).lower(),
        "as_expected": str(verdict.as_expected).lower(),
        "expectation": verdict.expectation,
        "why": verdict.why,
        "cause": verdict.cause,
        "frame": failure.frame if failure else None,
        "signature": failure.signature if failure else None,
        "source": attempt.source if attempt else None,
        "lines_added": verdict.changes.added if verdict.changes else None,
        "lines_deleted": verdict.changes.deleted if verdict.changes else None,
        "deviation": metrics.deviation if metrics else None,
        "tolerance": metrics.tolerance if metrics else None,
        "precision": attempt.precision if attempt else None,
        "unit": measured.unit if measured else None,
    }
    line |= _spread("throughput", measured.throughput if measured else None)
    line |= {
        "processes": len(measured.values) if measured else None,
        "comparable": str(measured.comparable).lower() if measured else None,
        "step_s": measured.step_s.median if measured and measured.step_s else None,
        "startup_s": measured.startup_s.median if measured and measured.startup_s else None,
        "peak_memory_bytes": measured.peak_memory_bytes if measured else None,
        "devices": attempt.devices.kind if attempt else None,
        "devices_expected": attempt.devices.expected if attempt else None,
        "devices_used": attempt.devices.used if attempt else None,
        "attempts": len(verdict.attempts),
        "run": attempt.run if attempt else row.journal.run.run,
        "started": attempt.started if attempt else None,
        "reproduce": attempt.reproduce if attempt else None,
    }
    return line


def _spread(name: str, sample: Sample | None) -> dict[str, Value]:
    if sample is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: sample.median, f"{name}_low": sample.low, f"{name}_high": sample.high}


def safe(value: Value) -> Value:
    """A value for a cell of CSV: visible, and no formula."""
    if not isinstance(value, str) or not value:
        return value
    if len(value) < 200 and value[0] not in _FORMULA and value.isascii() and value.isprintable():  # nearly all
        return value
    shown = one_line(value, 2000)
    return f"'{shown}" if shown.startswith(_FORMULA) or value.startswith(_FORMULA) else shown


def write_junit(evidence: Evidence, path: Path) -> None:
    """A test suite per machine, a test case per cell.

    As is and ported pass; broken and refused fail, or are skipped where a current expectation says so; unproven is
    skipped with its reason, unless the cell was required; the tool's own errors are errors.
    """
    machines: dict[str, list[Row]] = {}
    for row in evidence.rows:
        machines.setdefault(row.machine, []).append(row)
    with path.open("w", encoding="utf-8") as file:
        file.write('<?xml version="1.0" encoding="utf-8"?>\n<testsuites name="portmatrix">\n')
        for machine, rows in machines.items():
            _suite(file, machine, rows)
        file.write("</testsuites>\n")


def _suite(file: TextIO, machine: str, rows: list[Row]) -> None:
    results = [(row, *_result(row)) for row in rows]
    tags = [tag for _, tag, _, _ in results]
    durations = [sum(a.duration_s or 0 for a in row.verdict.attempts) for row in rows]
    file.write(
        f'<testsuite name={_attribute(machine)} tests="{len(rows)}" failures="{tags.count("failure")}" '
        f'errors="{tags.count("error")}" skipped="{tags.count("skipped")}" time="{sum(durations):.3f}">\n'
    )
    for (row, tag, kind, message), duration in zip(results, durations, strict=True):
        workload = row.axes.get("workload", "portmatrix")
        file.write(
            f"  <testcase classname={_attribute(workload)} name={_attribute(row.cell)} "
            f'time="{duration:.3f}"{"" if tag else "/"}>\n'
        )
        if not tag:
            continue
        file.write(f"    <{tag} type={_attribute(kind)} message={_attribute(message)}>")
        if tag != "skipped":
            file.write(escape(_body(row)))
        file.write(f"</{tag}>\n  </testcase>\n")
    file.write("</testsuite>\n")


def _result(row: Row) -> tuple[str, str, str]:
    """The element of a row (empty for a plain pass), its type and its message."""
    verdict = row.verdict
    standing = words.standing(verdict)
    if verdict.tool_failed:
        return "error", "tool-error", verdict.why if verdict.verdict == "error" else standing
    if verdict.verdict in ("as-is", "ported"):
        return ("", "", "") if verdict.as_expected else ("failure", "unexpected-pass", standing)
    if verdict.verdict == "unproven":
        if verdict.as_expected:
            return "skipped", "unproven", f"unproven: {verdict.why}"
        return "failure", "required", f"required, but not executed: {verdict.why}"
    cause = verdict.cause or verdict.verdict
    if verdict.as_expected:
        return "skipped", "xfail", f"{standing}: {verdict.why}"
    return "failure", cause, f"{verdict.verdict}: {verdict.why}" + (f" [{standing}]" if standing else "")


def _body(row: Row) -> str:
    attempt = row.verdict.attempt
    if attempt is None:
        return row.verdict.why
    failure = attempt.failure
    parts = [attempt.reason or ""]
    if failure:
        advice = words.cause(failure.cause).advice
        parts += [f"{failure.cause}: {failure.message}", f"at {failure.frame}" if failure.frame else "", advice]
        parts.append(failure.traceback or "")
    parts.append(f"reproduce: {attempt.reproduce}" if attempt.reproduce else "")
    return "\n\n".join(clipped(part, _TRACEBACK_CHARACTERS) for part in parts if part)


def _attribute(text: str) -> str:
    return quoteattr(one_line(text, 1000))
