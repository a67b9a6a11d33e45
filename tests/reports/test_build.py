"""Journals in, files out."""

import datetime
from pathlib import Path

import pytest

from matrix.cli import main
from matrix.errors import UsageError
from reports.build import build

from .records import DAY, MadeUpRun, attempt, failure, planned
from .showcase import showcase


def test_the_files_are_written_and_the_exit_code_is_that_of_a_run(tmp_path: Path) -> None:
    good, bad = planned("good"), planned("bad")
    run = MadeUpRun().add(good, attempt(good)).add(bad, attempt(bad, "fail", failure=failure("hang", "slow")))
    built = build([run.write(tmp_path / "run")], tmp_path / "out", DAY)
    assert [path.name for path in built.paths] == ["index.html", "summary.md", "junit.xml", "cells.csv", "changes.csv"]
    assert all(path.stat().st_size for path in built.paths)
    assert (built.p3 / "efficiency.csv").read_text().startswith("problem,application,platform,fom,coverage_key")
    assert [verdict.verdict for verdict in built.verdicts] == ["as-is", "broken"]
    assert built.headline == "1 of 2 executed cells runs, unchanged."
    assert built.exit_code == 1


@pytest.mark.parametrize(("outcome", "ended", "code"), [("pass", True, 0), ("fail", True, 1), ("pass", False, 5)])
def test_the_command_exits_with_the_runs_code_when_asked_to(
    tmp_path: Path, outcome: str, ended: bool, code: int
) -> None:
    cell = planned()
    failed = failure("hang", "slow") if outcome == "fail" else None
    folder = MadeUpRun(ended=ended).add(cell, attempt(cell, outcome, failure=failed)).write(tmp_path / "run")
    words = ["report", str(folder), "-o", str(tmp_path / "out")]
    assert main([*words, "--exit-code"]) == code
    assert main(words) == 0


def test_a_torn_last_line_is_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    cell = planned()
    run = MadeUpRun(ended=False).add(cell, attempt(cell))
    built = build([run.write(tmp_path / "run", torn='{"kind": "attempt", "sche')], tmp_path / "out", DAY)
    assert [banner.kind for banner in built.banners] == ["partial", "damaged"]
    assert built.verdicts[0].verdict == "as-is"
    assert "could not be read" in built.page.read_text(encoding="utf-8")


def test_several_runs_in_a_folder_are_one_report(tmp_path: Path) -> None:
    for run in showcase():
        run.write(tmp_path / "results" / run.run)
    built = build([tmp_path / "results"], tmp_path / "out", DAY)
    assert len(built.verdicts) == 181
    assert built.exit_code == 4


def test_a_report_is_the_same_from_the_same_journals(tmp_path: Path) -> None:
    for run in showcase():
        run.write(tmp_path / "results" / run.run)
    first = build([tmp_path / "results"], tmp_path / "a", DAY)
    second = build([tmp_path / "results"], tmp_path / "b", DAY)
    assert [path.read_bytes() for path in first.paths] == [path.read_bytes() for path in second.paths]


def test_an_expectation_holds_until_its_day(tmp_path: Path) -> None:
    cell = planned(expect=("hang", "known"), until="2026-06-30")
    folder = MadeUpRun().add(cell, attempt(cell, "fail", failure=failure("hang", "slow"))).write(tmp_path / "run")
    assert build([folder], tmp_path / "out", datetime.date(2026, 6, 30)).exit_code == 0
    assert build([folder], tmp_path / "out", datetime.date(2026, 7, 1)).exit_code == 1


def test_no_journal_is_a_usage_error_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        build([tmp_path], tmp_path / "out", DAY)
    assert not (tmp_path / "out").exists()
