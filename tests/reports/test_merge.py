"""Journals of several runs and machines become one set of rows."""

import datetime
from pathlib import Path

import pytest

from matrix.errors import UsageError
from reports.merge import load, merge

from .records import DAY, START, MadeUpRun, attempt, failure, planned

CELL = planned("gpt", "torch", "cuda", "single")


def absent(machine: str, **fields: object) -> MadeUpRun:
    run = MadeUpRun(machine=machine, run=f"run-{machine}", **fields)  # type: ignore[arg-type]
    return run.add(CELL, attempt(CELL, "unavailable", evidence="none", reason="no NVIDIA device node"))


def executed(machine: str, **fields: object) -> MadeUpRun:
    return MadeUpRun(machine=machine, run=f"run-{machine}", **fields).add(CELL, attempt(CELL))  # type: ignore[arg-type]


def test_an_unavailable_cell_yields_to_evidence_from_another_machine() -> None:
    rows = merge([absent("laptop").journal(), executed("gpu-4").journal()], DAY).rows
    assert [(row.machine, row.verdict.verdict) for row in rows] == [("gpu-4", "as-is")]
    assert [each.machine for each in rows[0].elsewhere] == ["laptop"]


def test_machines_that_both_executed_a_cell_have_a_row_each() -> None:
    broken = MadeUpRun(machine="gpu-5", run="run-gpu-5")
    broken.add(CELL, attempt(CELL, "fail", failure=failure("hang", "no progress")))
    rows = merge([executed("gpu-4").journal(), broken.journal()], DAY).rows
    assert {row.machine: row.verdict.verdict for row in rows} == {"gpu-4": "as-is", "gpu-5": "broken"}


def test_compiled_yields_to_executed_but_not_to_unavailable() -> None:
    compiled = MadeUpRun(machine="compiler", run="c").add(CELL, attempt(CELL, evidence="compiled"))
    assert [row.machine for row in merge([compiled.journal(), executed("gpu-4").journal()], DAY).rows] == ["gpu-4"]
    assert [row.machine for row in merge([compiled.journal(), absent("laptop").journal()], DAY).rows] == ["compiler"]


def test_an_error_of_the_tool_never_yields() -> None:
    failed = MadeUpRun(machine="gpu-5", run="e").add(CELL, attempt(CELL, "error", reason="no hello"))
    rows = merge([failed.journal(), executed("gpu-4").journal()], DAY).rows
    assert {row.machine: row.verdict.verdict for row in rows} == {"gpu-5": "error", "gpu-4": "as-is"}


def test_a_cell_that_nobody_has_is_one_row_with_its_reason() -> None:
    never = MadeUpRun(machine="desktop", run="d").add(CELL)
    rows = merge([never.journal(), absent("laptop").journal()], DAY).rows
    assert [(row.verdict.verdict, row.verdict.why) for row in rows] == [("unproven", "no NVIDIA device node")]


def test_attempts_on_one_machine_all_stay_oldest_run_first() -> None:
    first = executed("gpu-4", started=START - datetime.timedelta(days=1))
    second = MadeUpRun(machine="gpu-4", run="second").add(CELL, attempt(CELL, "fail", failure=failure("hang", "slow")))
    (row,) = merge([second.journal(), first.journal()], DAY).rows
    assert [each.outcome for each in row.verdict.attempts] == ["pass", "fail"]
    assert row.verdict.verdict == "broken"
    assert row.decided_in.run.run == "second"


def test_the_plan_is_the_union_of_the_plans() -> None:
    other = planned("digits", "jax", "cpu", "single")
    rows = merge([executed("a").journal(), MadeUpRun(machine="a", run="x").add(other).journal()], DAY).rows
    assert {row.cell: row.verdict.verdict for row in rows} == {CELL.cell: "as-is", other.cell: "unproven"}


def test_the_newest_plan_says_what_is_expected() -> None:
    expecting = planned("gpt", "torch", "cuda", "single", expect=("hang", "known"))
    old = MadeUpRun(machine="a", run="old", started=START - datetime.timedelta(days=1)).add(
        expecting, attempt(CELL, "fail", failure=failure("hang", "slow"))
    )
    new = MadeUpRun(machine="a", run="new").add(CELL)
    assert [row.verdict.expectation for row in merge([new.journal(), old.journal()], DAY).rows] == ["none"]


def test_a_copy_of_a_journal_counts_once(tmp_path: Path) -> None:
    run = executed("gpu-4")
    run.write(tmp_path / "a" / "run")
    run.write(tmp_path / "b" / "run")
    (row,) = load([tmp_path / "a", tmp_path / "b", tmp_path / "a" / "run" / "journal.jsonl"], DAY).rows
    assert len(row.verdict.attempts) == 1


def test_a_file_that_is_no_journal_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    executed("gpu-4").write(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "journal.jsonl").write_text("<html>")
    evidence = load([tmp_path], DAY)
    assert len(evidence.rows) == 1
    assert "bad/journal.jsonl" in evidence.unreadable[0]


def test_nothing_to_read_is_a_usage_error_that_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no journal\.jsonl at or below"):
        load([tmp_path], DAY)
    with pytest.raises(UsageError, match="no such file or folder"):
        load([tmp_path / "absent"], DAY)


def test_attempts_of_cells_that_are_no_longer_planned_are_counted() -> None:
    run = executed("gpu-4")
    run.attempts.append(attempt(planned("gone")))
    assert merge([run.journal()], DAY).unplanned == 1
