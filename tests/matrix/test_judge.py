"""The verdict of a cell from its attempts, how it stands to its expectation, and the exit code of a run."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from matrix.journal import AttemptRecord, Changes, Expectation, Failure, Layout, Metrics, PlannedCell, Target
from matrix.judge import CellVerdict, current, exit_code, judge

TODAY = datetime.date(2027, 3, 1)
CELL = "w/torch/cpu/single"


def cell(**more: Any) -> PlannedCell:
    axes = {"workload": "w", "backend": "torch", "accelerator": "cpu", "layout": "single"}
    return PlannedCell(cell=CELL, axes=axes, layout=Layout(name="single"), written_for="any", **more)


def attempt(outcome: str, source: str = "train.py", cause: str | None = None, **more: Any) -> AttemptRecord:
    """An attempt in short; `cause` is given for those that fail, a port is known by its name."""
    port = source.startswith("port")
    values: dict[str, Any] = {
        "run": "r",
        "machine": "m",
        "cell": CELL,
        "key": f"key of {source} in {more.get('phase', 'correctness')}",
        "axes": {},
        "source": source,
        "role": "port" if port else "baseline",
        "outcome": outcome,
        "evidence": "executed" if outcome in ("pass", "fail") else "none",
        "failure": Failure(cause=cause or "exception", message=f"{source}: it failed") if outcome == "fail" else None,
        "metrics": Metrics(tolerance=1e-5),
        "changes": Changes(added=3, deleted=1, hunks=1) if port else None,
    }
    return AttemptRecord(**values | more)


def one(*attempts: AttemptRecord, **more: Any) -> CellVerdict:
    return judge([cell(**more)], attempts, TODAY)[0]


MEASURED: dict[str, Any] = {"phase": "measurement"}
COMPILED: dict[str, Any] = {"evidence": "compiled"}
GPU = Target(accelerator="cuda", name="any", about="any NVIDIA GPU")
TPU = Target(accelerator="tpu", name="v5e", about="TPU v5e")

AGNOSTIC, PORT, BASELINE_FAILED = "device-agnostic source", "port.py (+3 -1)", "train.py: it failed"

TABLE: dict[str, tuple[list[AttemptRecord], str, str]] = {
    "nothing": ([], "unproven", "not run"),
    "absent": ([attempt("unavailable", reason="no GPU")], "unproven", "no GPU"),
    "baseline passes": ([attempt("pass")], "as-is", AGNOSTIC),
    "baseline fails": ([attempt("fail")], "broken", BASELINE_FAILED),
    "port passes": ([attempt("fail"), attempt("pass", "port.py")], "ported", PORT),
    "port fails": ([attempt("fail"), attempt("fail", "port.py")], "broken", "port.py: it failed"),
    "the second port passes": (
        [attempt("fail"), attempt("fail", "port1.py"), attempt("pass", "port2.py")],
        "ported",
        "port2.py (+3 -1)",
    ),
    "of ports that fail the nearest is shown": (
        [
            attempt("fail"),
            attempt("fail", "port1.py"),
            attempt("fail", "port2.py", changes=Changes(added=90, deleted=9, hunks=9)),
        ],
        "broken",
        "port1.py: it failed",
    ),
    "tool's error": ([attempt("error", reason="lost")], "error", "lost"),
    "tool's error, then a result": ([attempt("error", reason="lost"), attempt("pass")], "as-is", AGNOSTIC),
    "a result, then the tool's error": ([attempt("fail"), attempt("error", reason="lost")], "broken", BASELINE_FAILED),
    "baseline fails, the port is the tool's error": (
        [attempt("fail"), attempt("error", "port.py", reason="lost")],
        "error",
        "lost",
    ),
    "the baseline is the tool's error, an older port passed": (
        [attempt("pass", "port.py"), attempt("error", reason="lost")],
        "error",
        "lost",
    ),
    "a retry of the infrastructure": ([attempt("fail", cause="network"), attempt("pass")], "as-is", AGNOSTIC),
    "one of two repeats is wrong": (
        [attempt("fail", cause="wrong-result"), attempt("pass")],
        "broken",
        BASELINE_FAILED,
    ),
    "one of two repeats is wrong, a port passes": (
        [attempt("fail", cause="wrong-result"), attempt("pass"), attempt("pass", "port.py")],
        "ported",
        PORT,
    ),
    "wrong once, right in a later run of the same bytes": (
        [attempt("fail", cause="wrong-result"), attempt("pass", run="later")],
        "broken",
        BASELINE_FAILED,
    ),
    "a device that was lost is there in a later run": (
        [attempt("fail", cause="missing-device"), attempt("pass", run="later")],
        "as-is",
        AGNOSTIC,
    ),
    "the network failed when it was measured": (
        [attempt("pass"), attempt("fail", cause="network", **MEASURED)],
        "as-is",
        AGNOSTIC,
    ),
    "the tool broke before it tried a source, then a result": (
        [attempt("error").model_copy(update={"source": None, "role": None}), attempt("pass")],
        "as-is",
        AGNOSTIC,
    ),
    "passes, then does not": ([attempt("pass"), attempt("fail", cause="nondeterministic")], "broken", BASELINE_FAILED),
    "measured well": ([attempt("pass"), attempt("pass", **MEASURED)], "as-is", AGNOSTIC),
    "measured wrong": ([attempt("pass"), attempt("fail", **MEASURED)], "broken", BASELINE_FAILED),
    "measured wrong once of two": (
        [attempt("pass"), attempt("fail", **MEASURED), attempt("pass", **MEASURED)],
        "broken",
        BASELINE_FAILED,
    ),
    "port measured wrong": (
        [attempt("fail"), attempt("pass", "port.py"), attempt("fail", "port.py", **MEASURED)],
        "broken",
        "port.py: it failed",
    ),
    "no reference": (
        [attempt("pass", metrics=Metrics())],
        "unproven",
        "executed, but the workload has no reference to hold its result against",
    ),
    "compiles": ([attempt("pass", **COMPILED)], "unproven", "compiled, not executed"),
    "compiler refuses": ([attempt("fail", **COMPILED)], "refused", f"when compiled: {BASELINE_FAILED}"),
    "a trace refuses, for a target": (
        [attempt("fail", evidence="traced", target=GPU)],
        "refused",
        f"when traced for any NVIDIA GPU: {BASELINE_FAILED}",
    ),
    "compiler refuses the baseline, not the port": (
        [attempt("fail", **COMPILED), attempt("pass", "port.py", **COMPILED)],
        "unproven",
        "compiled by port.py (+3 -1), not executed",
    ),
    "of two targets one wants the port": (
        [
            attempt("pass", target=TPU, **COMPILED),
            attempt("fail", target=GPU, **COMPILED),
            attempt("pass", "port.py", target=GPU, **COMPILED),
        ],
        "unproven",
        "compiled for TPU v5e; compiled for any NVIDIA GPU by port.py (+3 -1), not executed",
    ),
    "compiler refuses, executed elsewhere": ([attempt("fail", **COMPILED), attempt("pass", "port.py")], "ported", PORT),
    "absent here, executed elsewhere": (
        [attempt("pass", machine="other"), attempt("unavailable", reason="no GPU")],
        "as-is",
        AGNOSTIC,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("attempts", "verdict", "why"), TABLE.values(), ids=list(TABLE))
def test_verdicts(attempts: list[AttemptRecord], verdict: str, why: str) -> None:
    found = one(*attempts)
    assert (found.verdict, found.why) == (verdict, why)
    assert found.attempts == tuple(attempts)


def test_a_source_written_for_a_device_is_shown_as_that() -> None:
    planned = cell().model_copy(update={"written_for": "cuda"})
    assert judge([planned], [attempt("pass")], TODAY)[0].why == "written for cuda"


def test_attempts_of_other_cells_are_ignored_and_the_order_is_the_plans() -> None:
    other = cell().model_copy(update={"cell": "x"})
    found = judge([other, cell()], [attempt("pass"), attempt("fail", cell="y")], TODAY)
    assert [(each.cell.cell, each.verdict) for each in found] == [("x", "unproven"), (CELL, "as-is")]


# --- what was before an edit ---


def test_after_an_edit_the_older_attempts_are_history() -> None:
    old, new = attempt("fail", key="old"), attempt("pass", key="new")
    assert current([old, new]) == [new]
    assert one(old, new).verdict == "as-is"
    assert one(new, old).verdict == "broken"  # edited back


def test_after_an_edit_of_one_source_the_others_stand() -> None:
    baseline, port, edited = (
        attempt("fail"),
        attempt("fail", "port.py", key="old"),
        attempt("pass", "port.py", key="new"),
    )
    assert current([baseline, port, edited]) == [baseline, edited]
    assert one(baseline, port, edited).verdict == "ported"


def test_a_measurement_before_an_edit_says_nothing_of_the_edited_source() -> None:
    attempts = [attempt("pass", key="old"), attempt("fail", **MEASURED), attempt("pass", key="new")]
    assert current(attempts) == attempts[2:]
    assert one(*attempts).verdict == "as-is"
    again = [*attempts, attempt("pass", **MEASURED, key="new measured")]
    assert current(again) == again[2:]


def test_a_measurement_stands_when_the_same_source_is_tried_again() -> None:
    attempts = [attempt("pass"), attempt("fail", **MEASURED), attempt("pass")]
    assert current(attempts) == attempts


def test_a_source_that_serves_the_cell_no_more_is_history() -> None:
    attempts = [attempt("fail"), attempt("pass", "port.py"), attempt("pass", "port.py", **MEASURED)]
    assert one(*attempts, sources=("train.py", "port.py")).verdict == "ported"
    found = one(*attempts, sources=("train.py",))
    assert (found.verdict, found.current, found.attempts) == ("broken", attempts[:1], tuple(attempts))
    assert one(*attempts).verdict == "ported"  # a journal that does not say


def test_what_was_executed_before_an_edit_yields_to_what_is_shown_after_it() -> None:
    executed = [attempt("fail", key="1"), attempt("pass", "port.py", key="2"), attempt("pass", "port.py", **MEASURED)]
    now = {"train.py": "1", "port.py": "2"}
    shown = attempt("pass", key="of the target", target=GPU, keys=now, **COMPILED)
    assert one(*executed, shown).verdict == "ported"
    edited = shown.model_copy(update={"keys": {**now, "port.py": "edited"}})
    assert current([*executed, edited]) == [executed[0], edited]
    assert one(*executed, edited).verdict == "broken"
    edited = shown.model_copy(update={"keys": {"train.py": "edited", "port.py": "edited"}})
    assert one(*executed, edited).why == "compiled for any NVIDIA GPU, not executed"


# --- expectations ---

DUE = "2027-03-01"


@pytest.mark.parametrize(
    ("attempts", "until", "state", "as_expected"),
    [
        ([attempt("fail", cause="shape")], None, "met", True),
        ([attempt("fail", cause="shape")], DUE, "met", True),  # the day itself still counts
        ([attempt("fail", cause="shape")], "2027-02-28", "expired", False),
        ([attempt("fail", cause="timeout")], None, "other-cause", False),
        ([attempt("fail", cause="timeout")], "2027-02-28", "expired", False),
        ([attempt("pass")], None, "passed", False),
        ([attempt("pass")], "2027-02-28", "passed", False),
        ([attempt("fail", cause="shape"), attempt("pass", "port.py")], None, "passed", False),
        ([attempt("fail", cause="timeout"), attempt("fail", "port.py", cause="shape")], None, "met", True),
        ([attempt("fail", cause="shape", **COMPILED)], None, "met", True),
        ([attempt("pass"), attempt("fail", cause="shape", **MEASURED)], None, "met", True),
        ([attempt("unavailable")], None, "untested", True),
        ([], "2027-02-28", "untested", True),
        ([attempt("error")], None, "untested", False),
    ],
)
def test_expectations(attempts: list[AttemptRecord], until: str | None, state: str, as_expected: bool) -> None:
    expected = Expectation(cause="shape", reason="known", until=until)
    found = one(*attempts, expectation=expected)
    assert (found.expectation, found.as_expected) == (state, as_expected)


@pytest.mark.parametrize(
    ("attempts", "as_expected"),
    [
        ([attempt("pass")], True),
        ([], False),
        ([attempt("unavailable")], False),
        ([attempt("pass", **COMPILED)], False),
        ([attempt("fail")], False),
        ([attempt("pass", metrics=Metrics())], True),  # executed: that is what was required
    ],
)
def test_what_is_required_must_be_executed(attempts: list[AttemptRecord], as_expected: bool) -> None:
    assert one(*attempts, required=True).as_expected is as_expected


# --- exit codes ---

PASSES, FAILS, ERROR = [attempt("pass")], [attempt("fail", cause="shape")], [attempt("error")]
KNOWN = {"expectation": Expectation(cause="shape", reason="known")}
LOST = [attempt("pass"), attempt("error", **MEASURED)]


@pytest.mark.parametrize(
    ("cells", "code"),
    [
        ([(PASSES, {})], 0),
        ([(PASSES, {}), (FAILS, KNOWN)], 0),
        ([(FAILS, KNOWN)], 0),
        ([(PASSES, {}), ([], {})], 0),
        ([(PASSES, {}), (FAILS, {})], 1),
        ([(PASSES, KNOWN)], 1),
        ([(PASSES, {}), ([attempt("unavailable")], {"required": True})], 1),
        ([([attempt("unavailable")], {"required": True})], 1),  # said before "nothing executed"
        ([([attempt("unavailable")], {})], 3),
        ([([attempt("pass", **COMPILED)], {})], 3),
        ([], 3),
        ([(PASSES, {}), (ERROR, {})], 4),
        ([(FAILS, {}), (ERROR, {})], 4),  # said before "not as expected"
        ([(ERROR, KNOWN)], 4),
        ([(LOST, {})], 4),  # passed, but what was to be measured is not known
        ([([*LOST, attempt("pass", **MEASURED)], {})], 0),  # a resumed run measured it
    ],
)
def test_exit_codes(cells: list[tuple[list[AttemptRecord], dict[str, Any]]], code: int) -> None:
    verdicts = [one(*attempts, **more) for attempts, more in cells]
    assert exit_code(verdicts) == code
    assert exit_code(verdicts, complete=False) == (code if code in (1, 4) else 5)
