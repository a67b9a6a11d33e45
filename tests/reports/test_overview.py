"""Counts, headline, groups of failures, and what limits the trust in the data."""

import datetime
from pathlib import Path

import pytest

from matrix.journal import Changes, Journal
from reports.merge import merge
from reports.overview import banners, by_target, expectations, headline, particulars, signatures, tally

from .records import DAY, START, MadeUpRun, attempt, failure, planned


def mixed() -> Journal:
    run = MadeUpRun()
    single, dp2, fsdp4 = (planned(layout=layout) for layout in ("single", "dp2", "fsdp4"))
    idle = attempt(dp2, "fail", failure=failure("idle-devices", "1 of 2 devices did work"))
    run.add(single, attempt(single))
    run.add(dp2, idle, attempt(dp2, role="port", changes=Changes(added=6, deleted=1, hunks=3)))
    run.add(fsdp4, attempt(fsdp4, "fail", failure=failure("hang", "no progress for 60 s")))
    tpu, rocm = planned(backend="jax", accelerator="tpu"), planned(accelerator="rocm")
    run.add(tpu, attempt(tpu, evidence="compiled"))
    run.add(rocm, attempt(rocm, "unavailable", evidence="none", reason="no /dev/kfd"))
    return run.journal()


def test_only_executed_cells_enter_the_headline() -> None:
    total = tally(merge([mixed()], DAY).rows)
    assert headline(total) == "2 of 3 executed cells run, 1 of them unchanged."
    assert particulars(total) == (
        "1 after a port (median 7 changed lines), 1 broken and 2 unproven (1 compiled, 1 without evidence)."
    )
    assert expectations(total) == "1 cell is not as expected."


def test_nothing_executed_is_said_as_such() -> None:
    cell = planned()
    total = tally(merge([MadeUpRun().add(cell).journal()], DAY).rows)
    assert headline(total) == "None of 1 cell was executed, so nothing is proven."


def test_counts_are_per_backend_and_accelerator() -> None:
    found = by_target(merge([mixed()], DAY).rows)
    assert list(found) == [("torch", "cpu"), ("jax", "tpu"), ("torch", "rocm")]
    cpu = found["torch", "cpu"]
    assert (cpu.verdicts["as-is"], cpu.verdicts["ported"], cpu.verdicts["broken"]) == (1, 1, 1)
    assert cpu.changed_words == "7 lines"
    assert found["jax", "tpu"].evidence_words == "compiled"


def test_failures_of_one_signature_are_one_group_the_largest_first() -> None:
    run = MadeUpRun()
    for layout in ("single", "dp2", "fsdp4"):
        cell = planned(layout=layout)
        cause = "hang" if layout != "dp2" else "crash"
        run.add(cell, attempt(cell, "fail", failure=failure(cause, "no progress")))
    groups = signatures(merge([run.journal()], DAY).rows)
    assert [(group.cause, len(group.broken)) for group in groups] == [("hang", 2), ("crash", 1)]


def test_a_failure_that_a_port_cures_is_told_from_one_that_breaks() -> None:
    groups = {group.cause: group for group in signatures(merge([mixed()], DAY).rows)}
    assert (len(groups["idle-devices"].broken), len(groups["idle-devices"].ported)) == (0, 1)
    assert (len(groups["hang"].broken), len(groups["hang"].ported)) == (1, 0)


def kinds(journal: Journal, today: datetime.date = DAY) -> list[str]:
    return [banner.kind for banner in banners(merge([journal], today), today)]


def test_a_run_without_its_end_is_partial() -> None:
    cell = planned()
    run = MadeUpRun(ended=False).add(cell, attempt(cell))
    assert kinds(run.journal()) == ["partial"]


def test_data_are_old_after_a_week() -> None:
    journal = mixed()
    assert kinds(journal, START.date() + datetime.timedelta(days=7)) == []
    assert kinds(journal, START.date() + datetime.timedelta(days=8)) == ["old"]


def test_damaged_lines_and_notices_are_said() -> None:
    cell = planned()
    journal = MadeUpRun(notices=["the matcher {backend: tpu} matches nothing"]).add(cell).journal(Path("j"))
    journal.damaged = ["line 7: JSONDecodeError"]
    assert kinds(journal) == ["damaged", "notice"]


@pytest.mark.parametrize(
    ("as_is", "ported", "broken", "words"),
    [
        (3, 0, 0, "All 3 executed cells run, unchanged."),
        (1, 0, 0, "1 of 1 executed cell runs, unchanged."),
        (2, 1, 1, "3 of 4 executed cells run, 2 of them unchanged."),
        (0, 2, 1, "2 of 3 executed cells run, all of them after a port."),
        (0, 0, 2, "None of 2 executed cells runs."),
    ],
)
def test_the_headline_fits_the_numbers(as_is: int, ported: int, broken: int, words: str) -> None:
    run = MadeUpRun()
    for number in range(as_is + ported + broken):
        cell = planned(f"w{number}")
        bad = attempt(cell, "fail", failure=failure("hang", "slow"))
        good = [attempt(cell)] if number < as_is else [bad, attempt(cell, role="port")]
        run.add(cell, *(good if number < as_is + ported else [bad]))
    assert headline(tally(merge([run.journal()], DAY).rows)) == words
