"""Journals in, files out: `index.html`, `summary.md`, `junit.xml`, `cells.csv`, `changes.csv`, the folder `p3`."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from matrix.judge import CellVerdict, exit_code
from reports import p3, required
from reports.exports import write_csv, write_junit
from reports.html import write_page
from reports.markdown import LIMIT, summary
from reports.merge import load
from reports.overview import Banner, banners, headline, tally
from reports.portability import portability


@dataclass(frozen=True)
class Built:
    """What a report wrote, and what it says.

    Attributes:
        page: the self-contained HTML page.
        summary: Markdown for a job summary or a pull request.
        junit: JUnit XML, a test case per cell.
        cells: CSV, a line per cell and machine.
        changes: CSV, a line per cell that a port passed, or of which the nearest port failed.
        p3: a folder with data for Intel's p3 analysis library.
        verdicts: of every row, in the plan's order.
        banners: what limits the trust in the data: partial, damaged, old.
        headline: the answer in a sentence.
        exit_code: as the run would give it (`matrix.judge.exit_code`).
    """

    page: Path
    summary: Path
    junit: Path
    cells: Path
    changes: Path
    p3: Path
    verdicts: list[CellVerdict]
    banners: list[Banner]
    headline: str
    exit_code: int

    @property
    def paths(self) -> list[Path]:
        return [self.page, self.summary, self.junit, self.cells, self.changes]


def build(paths: Iterable[Path], out: Path, today: datetime.date | None = None) -> Built:
    """Write the report of the journals at or below `paths` into the folder `out`, which is made if needed.

    Args:
        paths: journals, run folders, or folders of runs.
        out: the folder to write to; files of an earlier report are replaced.
        today: the day against which age and expectations are judged; the current one (UTC) when left out.

    Raises:
        UsageError: there is no readable journal.
    """
    with _without_collector():
        return _build(paths, out, today or datetime.datetime.now(datetime.UTC).date())


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the search for reference cycles: records hold none, and looking through 100,000 takes half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _build(paths: Iterable[Path], out: Path, today: datetime.date) -> Built:
    evidence = load(paths, today)
    notes = banners(evidence, today)
    out.mkdir(parents=True, exist_ok=True)
    built = Built(
        page=out / "index.html",
        summary=out / "summary.md",
        junit=out / "junit.xml",
        cells=out / "cells.csv",
        changes=out / "changes.csv",
        p3=out / "p3",
        verdicts=evidence.verdicts,
        banners=notes,
        headline=headline(tally(evidence.rows)),
        exit_code=exit_code(evidence.verdicts, not any(journal.partial for journal in evidence.journals)),
    )
    write_csv(evidence, built.cells)
    write_junit(evidence, built.junit)
    required.write_csv(evidence, built.changes)
    portable = portability(evidence)
    p3.write(portable, built.p3)
    ports = required.markdown(evidence)
    built.summary.write_text(summary(evidence, notes, LIMIT - len(ports)) + ports, encoding="utf-8")
    write_page(evidence, notes, built.page, today, portable)
    return built
