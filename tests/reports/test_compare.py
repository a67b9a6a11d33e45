"""What changed between two sets of journals."""

from pathlib import Path

import pytest

from matrix.journal import AttemptRecord, Changes, PlannedCell
from reports.compare import Comparison, compare, compare_evidence, mann_whitney, smallest_p
from reports.merge import merge

from .records import DAY, MadeUpRun, around, attempt, failure, planned, processes

CELL = planned("gpt", "torch", "cpu", "dp2")
PORTED = Changes(added=6, deleted=1, hunks=3)


def a_run(*attempts: AttemptRecord, cell: PlannedCell = CELL, **fields: object) -> MadeUpRun:
    return MadeUpRun(**fields).add(cell, *attempts)  # type: ignore[arg-type]


def passed() -> AttemptRecord:
    return attempt(CELL)


def failed(cause: str = "hang") -> AttemptRecord:
    return attempt(CELL, "fail", failure=failure(cause, "no progress for 60 s"))


def between(base: MadeUpRun, head: MadeUpRun) -> Comparison:
    return compare_evidence(merge([base.journal()], DAY), merge([head.journal()], DAY))


@pytest.mark.parametrize(
    ("base", "head", "kind", "words", "code"),
    [
        (passed(), failed(), "newly broken", "as is -> broken (hang): no progress for 60 s", 1),
        (failed(), passed(), "fixed", "broken (hang) -> as is", 0),
        (failed(), failed("crash"), "other cause", "broken (hang) -> broken (crash)", 0),
        (attempt(CELL, "error", reason="no hello"), passed(), "new", "error -> as is", 0),
        (passed(), attempt(CELL, "unavailable", evidence="none", reason="no GPU"), "lost",
         "as is -> unproven: no GPU", 1),
        (passed(), attempt(CELL, "error", reason="no hello"), "lost", "as is -> error: no hello", 1),
        (failed(), attempt(CELL, evidence="compiled"), "lost",
         "broken (hang) -> unproven (compiled): compiled, not executed", 1),
    ],
)  # fmt: skip
def test_a_change_of_verdict_is_named(
    base: AttemptRecord, head: AttemptRecord, kind: str, words: str, code: int
) -> None:
    found = between(a_run(base), a_run(head))
    assert [(change.kind, change.words) for change in found.changes] == [(kind, words)]
    assert found.exit_code == code


def test_a_baseline_that_now_needs_a_port_is_newly_broken() -> None:
    head = a_run(failed(), attempt(CELL, role="port", changes=PORTED))
    (change,) = between(a_run(passed()), head).changes
    assert (change.kind, change.words) == ("newly broken", "as is -> ported (+6 \u22121): no progress for 60 s")


def test_a_cell_that_is_no_longer_planned_is_lost_unless_it_was_not_selected() -> None:
    other = planned("digits")
    base = a_run(passed())
    gone = between(base, a_run(attempt(other), cell=other))
    assert {change.kind: change.words for change in gone.changes} == {
        "lost": "as is -> no longer planned",
        "new": "not planned -> as is",
    }
    selected = between(base, a_run(attempt(other), cell=other, selection="workload=digits"))
    assert [change.kind for change in selected.changes] == ["new"]
    assert selected.outside == 1
    assert "1 executed cell of the base is not in the head's selection." in str(selected)


def speeds(before: list[float], after: list[float], **head: object) -> Comparison:
    base = a_run(passed(), *processes(CELL, before))
    return between(base, a_run(passed(), *processes(CELL, after), **head))


def test_slower_needs_enough_processes_a_significant_difference_and_five_per_cent() -> None:
    slow = speeds(around(1000, 5, 1), around(900, 5, 2))
    (change,) = slow.changes
    assert change.kind == "slower"
    assert change.ratio == pytest.approx(0.9, abs=0.03)
    assert change.p == pytest.approx(2 / 252)  # 5 of 5 below 5 of 5: 2 / C(10, 5)
    assert slow.exit_code == 1
    assert speeds(around(1000, 5, 1), around(1110, 5, 2)).of("faster")
    assert not speeds(around(1000, 9, 1, 0.001), around(970, 9, 2, 0.001)).changes  # significant, but 3 %
    assert not speeds([1000, 800, 1200, 900, 1100], [940, 760, 1150, 850, 1040]).changes  # 6 %, but noise


def test_few_processes_are_said_to_be_too_few() -> None:
    found = speeds([1000, 1001, 1002], [500, 501, 502])
    (change,) = found.changes
    assert change.kind == "unclear"
    assert "too few processes to tell" in change.words
    assert found.exit_code == 0
    assert found.untested == {"too few processes": 1}


def test_speed_is_not_compared_across_machines_or_where_it_is_not_comparable() -> None:
    assert speeds([100.0] * 5, [50.0] * 5, machine="other").untested == {"other machine": 1}
    base = a_run(passed(), *processes(CELL, [100.0] * 5, comparable=False))
    assert between(base, base).untested == {"not comparable on this hardware": 1}


def test_a_set_compared_with_itself_has_no_change() -> None:
    found = speeds(around(1000, 5, 1), around(1000, 5, 1))
    assert str(found) == "No cell changed.\n\n1 executed cell unchanged; speed compared in 1 cell."
    assert found.exit_code == 0


def test_the_smallest_p_tells_how_many_processes_are_enough() -> None:
    assert smallest_p(3, 3) == pytest.approx(0.1)
    assert smallest_p(4, 4) == pytest.approx(2 / 70)
    assert mann_whitney([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70)


def test_the_text_lists_the_worst_first(tmp_path: Path) -> None:
    second = planned("digits", "jax", "cpu", "single")
    base = a_run(passed()).add(second, attempt(second, "fail", failure=failure("hang", "x")))
    head = a_run(failed()).add(second, attempt(second))
    base.write(tmp_path / "base")
    head.write(tmp_path / "head")
    assert str(compare([tmp_path / "base"], [tmp_path / "head"], DAY)) == (
        "newly broken (1): ran before, does not now (or only after a port)\n"
        "  gpt/torch/cpu/dp2  as is -> broken (hang): no progress for 60 s\n"
        "\n"
        "fixed (1): did not run before, does now (or now without a port)\n"
        "  digits/jax/cpu/single  broken (hang) -> as is\n"
        "\n"
        "0 executed cells unchanged; speed compared in 0 cells."
    )
