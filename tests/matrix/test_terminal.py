"""What a person sees of a run, line by line."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest._io import TerminalWriter

from matrix import judge, terminal
from matrix.journal import AttemptRecord, Failure
from matrix.judge import CellVerdict
from matrix.terminal import Progress, _plain
from tests.matrix.test_judge import attempt, cell, one

CELL = "w/torch/cpu/single"


class Screen(io.StringIO):
    """A terminal: it knows what stands there after what was written to it."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        return [line.rpartition("\r\x1b[2K")[2] for line in self.getvalue().split("\n")]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    made = Screen()
    monkeypatch.setattr(terminal, "sys", SimpleNamespace(stdout=made))  # pytest puts its own in the place of sys.stdout
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("CI", raising=False)
    return made


def progress(*attempts: AttemptRecord, **more: Any) -> Progress:
    verdicts = {CELL: one(*attempts, **more)}
    session: Any = SimpleNamespace(
        verdict=verdicts.__getitem__,
        folder="results/x",
        carried=0,
        options=SimpleNamespace(workers=1, resume=False),
        plan=SimpleNamespace(cells=[0], notices=["odd"], definition=SimpleNamespace(name="cpu")),
    )
    made = Progress(session)
    made.total = 1
    return made


def report(**more: Any) -> Any:
    values = {
        "when": "call",
        "failed": False,
        "nodeid": f"cpu.yaml::{CELL}",
        "portmatrix_failure": "",
        "longreprtext": "",
    }
    return SimpleNamespace(**values | more)


FAILED = attempt("fail", failure=Failure(cause="shape", message="4 is not 5\nmore"))


@pytest.mark.parametrize(
    ("attempts", "expected", "line"),
    [
        ([attempt("pass")], None, "[1/1] ok    w/torch/cpu/single  as-is: device-agnostic source"),
        (
            [attempt("fail"), attempt("pass", "port.py")],
            None,
            "[1/1] port  w/torch/cpu/single  ported: port.py (+3 -1)",
        ),
        ([FAILED], None, "[1/1] FAIL  w/torch/cpu/single  broken: shape: 4 is not 5"),
        ([FAILED], "shape", "[1/1] xfail w/torch/cpu/single  broken: shape: 4 is not 5"),
        ([attempt("unavailable", reason="no GPU")], None, "[1/1] --    w/torch/cpu/single  unproven: no GPU"),
        ([attempt("error", reason="lost")], None, "[1/1] ERR   w/torch/cpu/single  error: lost"),
        ([attempt("error", reason="\x1b[2Jlost")], None, "[1/1] ERR   w/torch/cpu/single  error: ?[2Jlost"),
    ],
)
def test_a_cell_is_a_line(screen: Screen, attempts: list[AttemptRecord], expected: str | None, line: str) -> None:
    from matrix.journal import Expectation

    known = {"expectation": Expectation(cause=expected, reason="known")} if expected else {}
    progress(*attempts, **known).pytest_runtest_logreport(report())
    assert screen.getvalue() == line + "\n"


def test_details_are_shown_of_what_is_not_as_expected_and_are_bounded(screen: Screen) -> None:
    details = "\n".join(f"line {number}" for number in range(100))
    progress(FAILED).pytest_runtest_logreport(report(portmatrix_failure=details, failed=True))
    assert screen.lines()[1:] == [f"          line {number}" for number in range(40)] + [""]


def test_a_process_that_crashed_is_a_line_too(screen: Screen) -> None:
    lost = report(when="???", failed=True, longreprtext="worker 'gw0' crashed")
    del lost.portmatrix_failure
    progress(attempt("error", reason="worker 'gw0' crashed")).pytest_runtest_logreport(lost)
    assert screen.lines() == [
        "[1/1] ERR   w/torch/cpu/single  error: worker 'gw0' crashed",
        "          worker 'gw0' crashed",
        "",
    ]


@pytest.mark.parametrize("when", ["setup", "teardown"])
def test_what_surrounds_a_cell_is_not_shown(screen: Screen, when: str) -> None:
    progress(attempt("pass")).pytest_runtest_logreport(report(when=when))
    assert screen.getvalue() == ""


def test_the_status_line_gives_way_to_lines_and_never_wraps(screen: Screen) -> None:
    shown = progress(attempt("pass"))
    shown.total = 3
    for name in ("a", "b"):
        shown.pytest_runtest_logstart(f"cpu.yaml::{name}/torch/cpu/single")
    shown.pytest_runtest_logstart(f"cpu.yaml::{CELL}")
    draw(shown)
    assert screen.lines()[-1] == "0/3 cells  now: a/torch/cpu/single, b/torch/cpu/single, w/t"  # 59 of 60 columns
    shown.pytest_runtest_logreport(report())
    draw(shown)
    assert screen.lines() == [
        "[1/3] ok    w/torch/cpu/single  as-is: device-agnostic source",
        "1/3 cells  1 as-is  about 0 s left  now: a/torch/cpu/single",  # 59 again
    ]
    shown.close()
    assert screen.lines()[-1] == ""


def draw(shown: Progress) -> None:
    shown._write((shown._status()[:59], {"light": True}), status=True)


def test_the_thread_of_the_status_line_writes_nothing_after_the_end(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "TICK_S", 0.0001)
    drawn = threading.Event()
    write: Callable[..., Any] = TerminalWriter.write
    monkeypatch.setattr(TerminalWriter, "write", lambda *a, **k: (write(*a, **k), drawn.set()))
    for _ in range(20):
        drawn.clear()
        shown = progress(attempt("pass"))
        shown.ticker.start()
        assert drawn.wait(60)
        shown.close()
        before = screen.getvalue()
        shown.ticker.join(60)
        assert screen.getvalue() == before
        assert screen.lines()[-1] == ""


@pytest.mark.parametrize(
    ("variables", "live"),
    [({}, True), ({"CI": "true"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, True)],
)
def test_where_there_is_a_status_line(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], live: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert progress().live is live
    monkeypatch.setattr(terminal, "sys", SimpleNamespace(stdout=io.StringIO()))
    assert progress().live is False


@pytest.mark.parametrize(
    ("attempts", "code", "words"),
    [
        ([attempt("pass")], 0, "1 cells: 1 as-is; 1 executed; all as expected"),
        ([attempt("fail")], 1, "1 cells: 1 broken; 1 executed; not all as expected"),
        ([], 3, "1 cells: 1 unproven; 0 executed; nothing was executed"),
        ([attempt("error")], 4, "1 cells: 1 error; 0 executed; the tool could not judge every cell"),
        ([], 5, "1 cells: 1 unproven; 0 executed; not all was run"),
        ([], 130, "1 cells: 1 unproven; 0 executed; interrupted"),
    ],
)
def test_the_summary_says_what_the_exit_code_means(
    screen: Screen, attempts: list[AttemptRecord], code: int, words: str
) -> None:
    verdicts: list[CellVerdict] = judge.judge([cell()], attempts)
    progress().summary(verdicts, code)
    assert screen.lines() == [f"{words}; 0 min 00 s", "results: results/x", ""]


def test_what_a_terminal_would_obey_is_taken_out() -> None:
    assert _plain("a\x1b]0;title\x07\x9b2J\u202eb\tc é漢") == "a?]0;title??2J?b?c é漢"
