"""What a person sees of a run: a line for each cell, a status line on a terminal, a summary at the end.

Private names of pytest used (verified with pytest 9.2): `_pytest._io.TerminalWriter`, and
`_pytest.terminal.TerminalReporter` with the methods that are overridden here, `_add_stats` and `_session`.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections import Counter
from typing import Any

import pytest
from _pytest._io import TerminalWriter
from _pytest.terminal import TerminalReporter

from matrix import judge
from matrix.journal import AttemptRecord
from matrix.judge import CellVerdict
from matrix.plan import Cell
from matrix.session import Session

MAX_DETAILS = 40  # lines of a failure; the journal has the rest
TICK_S = 1.0  # between two drawings of the status line

SYMBOLS = {
    "as-is": ("ok  ", {"green": True}),
    "ported": ("port", {"green": True}),
    "broken": ("FAIL", {"red": True, "bold": True}),
    "refused": ("FAIL", {"red": True, "bold": True}),
    "unproven": ("--  ", {"light": True}),
    "error": ("ERR ", {"red": True, "bold": True}),
}
EXPECTED = ("xfail", {"yellow": True})


class Quiet(TerminalReporter):  # type: ignore[misc]  # final for type checkers, and all that there is to replace it
    """Pytest's reporter with nothing to say: plugins that look for it find it, `Progress` speaks."""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_collection(self) -> None: ...
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add_stats("error", [report])

    def pytest_collection_finish(self, session: pytest.Session) -> None: ...
    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None: ...
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None: ...
    def pytest_runtest_logfinish(self, nodeid: str) -> None: ...
    def pytest_internalerror(self, excrepr: Any) -> bool:
        print(f"\n{excrepr}", file=sys.stderr)
        return True

    def write(self, content: str, *, flush: bool = False, **markup: bool) -> None: ...
    def write_line(self, line: str | bytes, **markup: bool) -> None: ...
    def ensure_newline(self) -> None: ...
    def rewrite(self, line: str, **markup: bool) -> None: ...
    def pytest_report_header(self, config: pytest.Config) -> list[str]:
        return []

    def summary_stats(self) -> None: ...
    def short_test_summary(self) -> None: ...
    def summary_failures(self) -> None: ...
    def summary_errors(self) -> None:
        if self.stats.get("error"):
            super().summary_errors()

    def summary_warnings(self) -> None: ...
    def summary_passes(self) -> None: ...
    def summary_xfailures(self) -> None: ...
    def summary_xpasses(self) -> None: ...
    def _report_keyboardinterrupt(self) -> None: ...


class Progress:
    """Speaks during a run, in the controller."""

    def __init__(self, session: Session):
        self.session = session
        self.writer = TerminalWriter(sys.stdout)
        self.live = sys.stdout.isatty() and "CI" not in os.environ and os.environ.get("TERM") != "dumb"
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.total = self.done = 0
        self.running: dict[str, float] = {}
        self.phase = "cells"
        self.phase_started = self.started
        self.stopped = False
        self.shown = False
        self.closing = threading.Event()
        self.ticker = threading.Thread(target=self._tick, daemon=True)

    # --- as a plugin of pytest ---

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Put a silent reporter in the place of pytest's own."""
        manager = config.pluginmanager
        standing = manager.get_plugin("terminalreporter")
        if standing is not None:
            manager.unregister(standing)
        manager.register(Quiet(config, sys.stdout), "terminalreporter")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.total = len(ids)

    @pytest.hookimpl(tryfirst=True)  # the loop itself ends the call
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        self._say(self._headline())
        for notice in self.session.plan.notices:
            self._say(f"note: {notice}")
        if self.live:
            self.ticker.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running[nodeid] = time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and not report.failed:
            return
        began = self.running.pop(report.nodeid, time.monotonic())
        self.done += 1
        details = getattr(report, "portmatrix_failure", report.longreprtext)
        self._verdict(self.session.verdict(cell_of(report.nodeid)), time.monotonic() - began, details)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.stopped = bool(session.shouldstop or session.shouldfail)

    # --- what is said ---

    def _headline(self) -> str:
        cells, workers = len(self.session.plan.cells), self.session.options.workers
        resumed = f", resumed ({self.session.carried} attempts known)" if self.session.options.resume else ""
        beside = f", {workers} at a time" if workers > 1 else ""
        return (
            f"portmatrix {self.session.plan.definition.name}: {cells} cells{beside}{resumed} -> {self.session.folder}"
        )

    def _verdict(self, verdict: CellVerdict, seconds: float, details: str) -> None:
        symbol, look = SYMBOLS[verdict.verdict]
        if verdict.expectation == "met":
            symbol, look = EXPECTED
        self.counts[verdict.verdict] += 1
        cause = f"{verdict.cause}: " if verdict.verdict in ("broken", "refused") and verdict.cause else ""
        words = f"{verdict.verdict}: {cause}{verdict.why}".splitlines()[0]
        width = len(str(self.total))
        took = f" ({seconds:.0f} s)" if seconds >= 1 else ""
        parts: list[tuple[str, dict[str, bool]]] = [
            (f"[{self.done:{width}}/{self.total}] ", {}),
            (f"{symbol:<5}", look),
            (f" {verdict.cell.cell}  ", {}),
            (f"{_plain(words)}{took}\n", {"light": True}),
        ]
        if details and not verdict.as_expected:
            parts += [(f"          {_plain(line)}\n", {"light": True}) for line in details.splitlines()[:MAX_DETAILS]]
        self._write(*parts)

    def measuring(self, processes: int) -> None:
        self._say(f"measuring: {processes} processes, one at a time")
        self.phase, self.total, self.done = "measurements", processes, 0
        self.phase_started = time.monotonic()

    def measured(self, cell: Cell, turn: int, attempt: AttemptRecord) -> None:
        self.done += 1
        rate = attempt.metrics.throughput
        said = f"{rate.median:,.0f} {rate.unit}" if rate else "no steady throughput"
        if attempt.failure:
            said = f"{attempt.failure.cause}: {attempt.failure.message}"
        elif attempt.reason:
            said = attempt.reason
        width = len(str(self.total))
        self._say(f"[{self.done:{width}}/{self.total}] {cell.id}  process {turn}: {_plain(said)}")

    def said(self, text: str) -> None:
        self._say(_plain(text))

    def note(self, text: str) -> None:
        self._say(text, yellow=True)

    def _say(self, text: str, **look: bool) -> None:
        self._write((text + "\n", look))

    def _write(self, *parts: tuple[str, dict[str, bool]], status: bool = False) -> None:
        """Write in place of the status line, or the status line itself."""
        with self.lock:
            if status and self.closing.is_set():
                return
            try:
                line = "".join(self.writer.markup(text, **look) for text, look in parts)
                self.writer.write("\r\x1b[2K" + line if self.shown else line, flush=True)
            except OSError:  # the reader of our output has gone; the run has not
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.shown = status

    # --- the status line of a terminal ---

    def _tick(self) -> None:
        while not self.closing.wait(TICK_S):
            line = self._status()[: max(1, shutil.get_terminal_size().columns - 1)]
            self._write((line, {"light": True}), status=True)

    def _status(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in list(self.counts.items()))
        left = self._left()
        running = [cell_of(node) for node in list(self.running)]
        parts = [
            f"{self.done}/{self.total} {self.phase}",
            counts,
            left,
            "now: " + ", ".join(running) if running else "",
        ]
        return "  ".join(part for part in parts if part)

    def _left(self) -> str:
        if not self.done or self.done >= self.total:
            return ""
        seconds = (time.monotonic() - self.phase_started) / self.done * (self.total - self.done)
        return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"

    def close(self) -> None:
        """Take the status line away; nothing draws it again."""
        self.closing.set()
        self._write()

    def summary(self, verdicts: list[CellVerdict], code: int) -> None:
        """The closing lines: counts, where the results lie, what the exit code means."""
        counts = Counter[str](verdict.verdict for verdict in verdicts)
        executed = sum(verdict.executed for verdict in verdicts)
        words = ", ".join(f"{counts[name]} {name}" for name in SYMBOLS if counts[name])
        meaning = {
            judge.EXIT_AS_EXPECTED: "all as expected",
            judge.EXIT_NOT_AS_EXPECTED: "not all as expected",
            judge.EXIT_NOTHING_EXECUTED: "nothing was executed",
            judge.EXIT_INCOMPLETE: "not all was run",
            judge.EXIT_TOOL_ERROR: "the tool could not judge every cell",
            judge.EXIT_INTERRUPTED: "interrupted",
            judge.EXIT_USAGE: "usage error",
        }[code]
        minutes, seconds = divmod(round(time.monotonic() - self.started), 60)
        self._say(f"{len(verdicts)} cells: {words}; {executed} executed; {meaning}; {minutes} min {seconds:02} s")
        self._say(f"results: {self.session.folder}")


def cell_of(nodeid: str) -> str:
    """The id of the cell of an item."""
    return nodeid.partition("::")[2]


def _plain(text: str) -> str:
    """Text from outside without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)
