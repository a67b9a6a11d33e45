"""cells.csv for spreadsheets, junit.xml for continuous integration."""

import csv
import xml.etree.ElementTree as ET
from pathlib import Path

from matrix.failures import CAUSES
from matrix.journal import Changes
from reports.exports import write_csv, write_junit
from reports.merge import merge

from .records import DAY, MadeUpRun, attempt, failure, planned, processes

HOSTILE = "\0\x1b[31m<script>alert(1)</script>]]>&\u202e\ud800\ufffe\uffff"


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_line_of_csv_has_verdict_changes_and_throughput(tmp_path: Path) -> None:
    cell = planned("gpt", "torch", "cpu", "dp2", precision="bf16")
    changes = Changes(added=6, deleted=1, hunks=3)
    run = MadeUpRun().add(
        cell,
        attempt(cell, "fail", failure=failure("idle-devices", "1 of 2 devices did work")),
        attempt(cell, role="port", changes=changes),
        *processes(cell, [100.0, 120.0, 110.0], role="port", changes=changes),
    )
    write_csv(merge([run.journal()], DAY), tmp_path / "cells.csv")
    (line,) = lines(tmp_path / "cells.csv")
    expected = {
        "cell": "gpt/torch/cpu/dp2/precision=bf16", "machine": "buildbox", "workload": "gpt", "backend": "torch",
        "accelerator": "cpu", "layout": "dp2", "precision": "ieee-f32", "verdict": "ported", "evidence": "executed",
        "executed": "true", "as_expected": "true", "source": "torch/ddp.py", "lines_added": "6", "lines_deleted": "1",
        "unit": "tokens/s", "throughput": "110.0", "throughput_low": "100.0", "throughput_high": "120.0",
        "processes": "3", "comparable": "true", "devices_expected": "2", "attempts": "5",
    }  # fmt: skip
    assert {name: line[name] for name in expected} == expected


def test_no_cell_of_the_csv_is_a_formula_and_numbers_stay_numbers(tmp_path: Path) -> None:
    run = MadeUpRun()
    for text in ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "plain"):
        cell = planned(text, layout="single")
        run.add(cell, attempt(cell, "error", reason=text))
    write_csv(merge([run.journal()], DAY), tmp_path / "cells.csv")
    found = [line["why"] for line in lines(tmp_path / "cells.csv")]
    assert found == ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "'=1", "'=1", "plain"]
    assert [line["workload"] for line in lines(tmp_path / "cells.csv")] == found
    assert {line["attempts"] for line in lines(tmp_path / "cells.csv")} == {"1"}


def junit(tmp_path: Path, run: MadeUpRun) -> ET.Element:
    write_junit(merge([run.journal()], DAY), tmp_path / "junit.xml")
    return ET.parse(tmp_path / "junit.xml").getroot()


def test_junit_tells_failure_skip_and_error_apart(tmp_path: Path) -> None:
    run = MadeUpRun()
    names = ["good", "broken", "known", "better", "other", "absent", "missed", "tool"]
    expecting = {"known", "better", "other"}
    for name in names:
        cell = planned(name, expect=("hang", "a known bug") if name in expecting else None, required=name == "missed")
        outcome: dict[str, object] = {
            "broken": {"outcome": "fail", "failure": failure("hang", "no progress")},
            "known": {"outcome": "fail", "failure": failure("hang", "no progress")},
            "other": {"outcome": "fail", "failure": failure("crash", "signal 11")},
            "absent": {"outcome": "unavailable", "evidence": "none", "reason": "no GPU"},
            "missed": {"outcome": "unavailable", "evidence": "none", "reason": "no GPU"},
            "tool": {"outcome": "error", "reason": "no hello"},
        }
        run.add(cell, attempt(cell, **outcome.get(name, {})))  # type: ignore[arg-type]
    root = junit(tmp_path, run)
    found = {}
    for case in root.iter("testcase"):
        results = [(child.tag, child.get("type"), child.get("message")) for child in case]
        found[case.get("name", "").split("/")[0]] = results[0] if results else None
    known = "a known bug"
    assert found == {
        "good": None,
        "broken": ("failure", "hang", "broken: no progress"),
        "known": ("skipped", "xfail", f"as expected (hang: {known}): no progress"),
        "better": ("failure", "unexpected-pass", f"expected to fail, but passed (hang: {known})"),
        "other": ("failure", "crash", f"broken: signal 11 [expected to fail, but for another cause (hang: {known})]"),
        "absent": ("skipped", "unproven", "unproven: no GPU"),
        "missed": ("failure", "required", "required, but not executed: no GPU"),
        "tool": ("error", "tool-error", "no hello"),
    }
    suite = root.find("testsuite")
    assert suite is not None
    counts = {name: suite.get(name) for name in ("name", "tests", "failures", "errors", "skipped")}
    assert counts == {"name": "buildbox", "tests": "8", "failures": "4", "errors": "1", "skipped": "2"}


def test_a_cell_that_runs_but_was_not_measured_for_the_tools_own_fault_is_an_error(tmp_path: Path) -> None:
    cell = planned()
    run = MadeUpRun().add(cell, attempt(cell), attempt(cell, "error", phase="measurement", reason="no hello"))
    (case,) = junit(tmp_path, run).iter("testcase")
    assert [(child.tag, child.get("message")) for child in case] == [
        ("error", "an attempt ended in an error of the tool: no hello")
    ]


def test_junit_is_well_formed_whatever_the_texts_hold(tmp_path: Path) -> None:
    cell = planned(HOSTILE)
    bad = failure("hang", HOSTILE, traceback=HOSTILE * 100)
    (case,) = junit(tmp_path, MadeUpRun(machine=HOSTILE).add(cell, attempt(cell, "fail", failure=bad))).iter("testcase")
    shown = "\\x00<script>alert(1)</script>]]>&\\u202e\\ud800\\ufffe\\uffff"
    assert case.get("classname") == shown
    assert shown in (case.findtext("failure") or "")


def test_a_failure_in_junit_has_cause_place_advice_traceback_and_command(tmp_path: Path) -> None:
    cell = planned()
    run = MadeUpRun().add(cell, attempt(cell, "fail", failure=failure("shape", "mat1 and mat2 do not fit")))
    (case,) = junit(tmp_path, run).iter("testcase")
    text = case.findtext("failure") or ""
    parts = ("shape: mat1 and mat2", "at torch/train.py:18", CAUSES["shape"].advice, "Traceback", "reproduce: python")
    assert [part for part in parts if part not in text] == []
