"""The order in which reasons count, from observations that are made up; expected values are written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from matrix import outcome
from matrix.failures.death import native_frame, stack_frame
from matrix.launch.process import Event, Observation
from matrix.outcome import Judged
from matrix.plan import Cell
from tests.matrix.harness import Bench

STEPS = 3


@pytest.fixture
def cell(bench: Bench) -> Cell:
    """One device, three steps, a reference of 3, 2, 1."""
    bench.workload(
        "w",
        {"train.py": "a = 1\nb = 2\nc = 3\n"},
        {"torch": {"baseline": {"file": "train.py"}}},
        reference="step,loss\n1,3.0\n2,2.0\n3,1.0\n",
        arguments={"steps": "--steps", "log_every": "--log-every"},
    )
    return bench.cell("w", steps=STEPS, log_every=1)


CPU = {"id": "cpu", "platform": "cpu", "kind": "cpu", "work": 10, "parameter_bytes": 8}


def start(pid: int = 1) -> Event:
    return {"event": "start", "time": 0.0, "pid": pid, "host": "h", "rank": 0}


def line(step: int, loss: float) -> Event:
    return {"event": "progress", "time": float(step), "written": float(step), "step": step, "loss": loss, "units": None,
            "graphs": 0}  # fmt: skip


def seen_event(**more: Any) -> Event:
    report = {"framework": "torch", "devices": [CPU], "parameter_bytes": {"local": 8, "global": 8}, "trouble": None,
              "dtypes": {"float32": 1}, "matmul_precision": {"matmul": "ieee"}, "compiled": {}}  # fmt: skip
    return {"event": "seen", "time": 2.0, **report, **more}


def end() -> Event:
    return {"event": "end", "time": 9.0, "peak_memory_bytes": 1, "graphs": 0, "device_peak_bytes": None}


def raised(cell: Cell, kind: str, message: str, time: float = 5.0, at: int = 2) -> Event:
    frame = {"file": str(cell.workload.folder / "train.py"), "line": at, "function": "<module>", "module": "__main__"}
    link = {"type": kind, "bases": [kind], "message": message, "frames": [frame], "raised": False, "code": ""}
    return {"event": "exception", "time": time, "chain": [link], "traceback": f"{kind}: {message}"}


def judge(cell: Cell, events: dict[int, list[Event]] | list[Event], code: int | None = 0, **more: Any) -> Judged:
    ranks = events if isinstance(events, dict) else {0: events}
    return outcome.judge(cell, Observation(code=code, events=ranks, **more), STEPS, 1)


def said(judged: Judged) -> tuple[str, str | None, str]:
    found = judged.failure
    return judged.outcome, found and found.cause, (found.message if found else judged.reason) or ""


def test_lines_of_the_workloads_own_pattern_are_progress_also_in_a_log(cell: Cell, tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("epoch 3 | train 2.5\n")
    told = {"logs": {"0": log}, "progress": r"epoch (?P<step>\d+) \| train (?P<loss>\S+)"}
    outcome_, _, why = said(judge(cell, [start(), end()], **told))
    assert (outcome_, why[:20]) == ("error", "progress was printed")
    assert said(judge(cell, GOOD[:-1], 5, **told)) == ("fail", "exit", "exit code 5, without an exception")
    log.write_text("no space left\n")
    assert said(judge(cell, GOOD[:-1], 5, **told))[2] == "exit code 5, without an exception: no space left"


GOOD = [start(), line(1, 3.0), line(2, 2.0), seen_event(), line(3, 1.0), end()]


def test_a_complete_and_right_run_passes(cell: Cell) -> None:
    assert said(judge(cell, GOOD)) == ("pass", None, "")


def test_trouble_of_the_tool_comes_before_everything(cell: Cell) -> None:
    events = [*GOOD[:-1], raised(cell, "ValueError", "x")]
    assert said(judge(cell, events, 1, trouble="the supervisor is gone")) == ("error", None, "the supervisor is gone")


def test_an_exception_after_a_loss_that_was_nan_names_both(cell: Cell) -> None:
    events = [
        start(),
        line(1, 3.0),
        line(2, 2.0),
        seen_event(),
        line(3, float("nan")),
        raised(cell, "ValueError", "bad"),
    ]
    found = judge(cell, events, 1)
    assert said(found) == ("fail", "exception", "ValueError: bad\n(before that, the loss of step 3 is nan)")
    assert found.failure is not None
    assert found.failure.frame == "train.py:2"
    assert found.failure.excerpt == [(1, "a = 1"), (2, "b = 2"), (3, "c = 3")]


def test_a_code_other_than_zero_after_a_complete_run_fails(cell: Cell) -> None:
    assert said(judge(cell, GOOD, 5)) == ("fail", "exit", "exit code 5, without an exception")


def test_a_signal_after_a_complete_run_fails(cell: Cell) -> None:
    assert said(judge(cell, GOOD, -11)) == ("fail", "crash", "the process was ended by SIGSEGV")


def test_an_exit_code_that_the_system_cuts_to_zero_is_none_as_by_hand(cell: Cell) -> None:
    leaves = {"event": "exit", "time": 8.0, "code": 256, "chain": [], "traceback": ""}
    assert judge(cell, [*GOOD[:-1], leaves, GOOD[-1]], 0).outcome == "pass"


def test_what_was_ended_as_untrue_is_judged_by_what_was_untrue(cell: Cell) -> None:
    events = [start(), line(1, 3.0), line(2, 2.5), seen_event(), raised(cell, "KeyboardInterrupt", "")]
    assert said(judge(cell, events, None, ended_by="untrue"))[:2] == ("fail", "wrong-result")
    off = dict(CPU, id="cuda:0", platform="cuda")
    events = [start(), line(1, 3.0), line(2, 2.5), seen_event(devices=[off])]
    assert said(judge(cell, events, None, ended_by="untrue"))[:2] == ("fail", "wrong-device")


def test_nothing_is_concluded_from_an_end_that_was_ours(cell: Cell) -> None:
    events = [start(), line(1, 3.0), line(2, 2.0), seen_event()]
    assert judge(cell, events, None, ended_by="untrue").outcome == "error"


def test_the_first_rank_to_raise_is_shown_and_later_ones_follow(cell: Cell) -> None:
    events = {
        0: [start(1), raised(cell, "KeyError", "'late'", 7.0)],
        1: [start(2), raised(cell, "KeyError", "'first'", 6.0)],
    }
    found = judge(cell, events, 1).failure
    assert found is not None
    assert (found.message, found.rank, found.followers) == ("KeyError: 'first'", 1, {"0": "KeyError: 'late'"})


LOST = "[pair.cc:553] Connection closed by peer [127.0.0.1]:29580."


def table(tmp_path: Path, *ended: tuple[int, int]) -> dict[str, Path]:
    log = tmp_path / "launcher.log"
    log.write_text("".join(f"  exitcode  : {code} (pid: {pid})\n" for pid, code in ended))
    return {"launcher": log}


def test_a_rank_that_only_lost_its_peer_follows_the_one_that_died(cell: Cell, tmp_path: Path) -> None:
    events = {0: [start(11), raised(cell, "RuntimeError", LOST)], 1: [start(12)]}
    found = judge(cell, events, 1, logs=table(tmp_path, (12, -9), (11, 1))).failure
    assert found is not None
    assert (found.cause, found.message, found.rank) == ("rank-died", "rank 1 was killed (SIGKILL)", 1)
    assert found.followers == {"0": f"RuntimeError: {LOST}"}


def test_a_rank_that_aborts_because_another_raised_is_not_the_first(cell: Cell, tmp_path: Path) -> None:
    events = {0: [start(11)], 1: [start(12), raised(cell, "ValueError", "bad sample")]}
    found = judge(cell, events, 1, logs=table(tmp_path, (11, -6), (12, 1))).failure
    assert found is not None
    assert (found.cause, found.message, found.rank) == ("exception", "ValueError: bad sample", 1)


def test_a_lost_connection_that_nothing_explains_is_the_networks(cell: Cell) -> None:
    events = {0: [start(11), raised(cell, "RuntimeError", LOST)], 1: [start(12)]}
    assert said(judge(cell, events, 1))[:2] == ("fail", "network")


def test_ranks_that_the_launcher_ended_do_not_hide_the_one_that_died(cell: Cell, tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    log.write_text("failed (exitcode: -11) local_rank: 1 (pid: 12) of binary: python\n  exitcode : -15 (pid: 11)\n")
    events = {0: [start(11)], 1: [start(12)]}
    found = judge(cell, events, None, ended_by="hang", logs={"launcher": log}).failure
    assert found is not None
    assert (found.cause, found.message, found.rank) == ("crash", "rank 1 was ended by SIGSEGV", 1)


@pytest.mark.parametrize(
    ("code", "cause", "message"),
    [
        (-9, "rank-died", "the process was killed (SIGKILL)"),
        (-15, "rank-died", "the process was killed (SIGTERM)"),
        (-6, "crash", "the process was ended by SIGABRT"),
        (-4, "crash", "the process was ended by SIGILL"),
        (-250, "crash", "the process was ended by signal 250"),
        (3, "exit", "exit code 3, without an exception"),
    ],
)
def test_every_end_without_a_word_has_a_cause(cell: Cell, code: int, cause: str, message: str) -> None:
    assert said(judge(cell, [start()], code)) == ("fail", cause, message)


@pytest.mark.parametrize(
    ("code", "log", "cause", "message"),
    [
        (
            127,
            "cannot start /x/python: No such file",
            "exit",
            "the launcher ended before the script began (exit code 127): cannot start /x/python: No such file",
        ),
        (
            1,
            'Traceback (most recent call last):\n  File "/x/site-packages/torch/__init__.py", line 5, in <module>\n'
            "    ctypes.CDLL(path)\nOSError: libtorch_cpu.so: cannot open shared object file: No such file\n",
            "broken-install",
            "the launcher ended before the script began (exit code 1): OSError: libtorch_cpu.so: cannot "
            "open shared object file: No such file",
        ),
        (
            1,
            "RuntimeError: The server socket has failed to listen on any local network address. EADDRINUSE",
            "rendezvous",
            "the launcher ended before the script began (exit code 1): RuntimeError: The server socket has failed to "
            "listen on any local network address. EADDRINUSE",
        ),
        (2, "", "exit", "the launcher ended before the script began (exit code 2)"),
        (-9, "", "rank-died", "the launcher ended before the script began (SIGKILL)"),
        (-11, "", "crash", "the launcher ended before the script began (SIGSEGV)"),
    ],
)
def test_a_launcher_that_fails_before_any_script_starts_is_a_failure_with_its_last_words(
    cell: Cell, tmp_path: Path, code: int, log: str, cause: str, message: str
) -> None:
    logs = {}
    if log:
        (tmp_path / "launcher.log").write_text(log)
        logs = {"launcher": tmp_path / "launcher.log"}
    assert said(judge(cell, {}, code, logs=logs)) == ("fail", cause, message)


def test_a_hang_after_the_end_says_that_only_the_process_stayed(cell: Cell) -> None:
    _, cause, message = said(judge(cell, GOOD, None, ended_by="hang", stacks={"0": "Process 1: python"}))
    assert cause == "hang"
    assert message.endswith("the script had come to its end, but its process did not")


def test_an_exception_comes_before_the_hang_that_followed(cell: Cell) -> None:
    events = [start(), raised(cell, "ValueError", "bad")]
    assert said(judge(cell, events, None, ended_by="hang"))[:2] == ("fail", "exception")


def test_a_timeout_tells_how_far_it_came(cell: Cell) -> None:
    assert said(judge(cell, [start(), line(1, 3.0)], None, ended_by="timeout")) == (
        "fail", "timeout", "did not end within its time limit; the last line was step 1"
    )  # fmt: skip


def test_no_event_at_all_and_a_clean_end_is_no_progress(cell: Cell) -> None:
    assert said(judge(cell, {}, 0))[:2] == ("fail", "no-progress")


def test_a_run_that_ends_early_is_incomplete(cell: Cell) -> None:
    assert said(judge(cell, [*GOOD[:4], end()], 0))[:2] == ("fail", "incomplete")


def test_surrogates_and_other_hostile_text_can_be_written_down(cell: Cell) -> None:
    found = judge(cell, [start(), raised(cell, "ValueError", "\ud800\x00\x1b[31m" + "x" * 100_000)], 1).failure
    assert found is not None
    assert "\\ud800" in found.model_dump_json() or "\\\\ud800" in found.model_dump_json()
    assert len(found.message) == 2_000


def test_the_line_of_a_crash_is_the_innermost_of_the_users() -> None:
    text = (
        "Fatal Python error: Segmentation fault\n\n"
        'Thread 0x01 (most recent call first):\n  File "/w/other.py", line 1 in g\n\n'
        'Current thread 0x02 (most recent call first):\n  File "/lib/ctypes/__init__.py", line 519 in string_at\n'
        '  File "/w/a.py", line 3 in f\n  File "/w/train.py", line 4 in <module>\n'
    )
    assert native_frame(text, "/w") == ("a.py", 3)


def test_the_line_of_a_hang_is_that_of_the_main_thread() -> None:
    text = (
        'Process 12: python\n\nThread 13 (active): "Worker"\n    g (/w/b.py:3)\n'
        'Thread 12 (idle): "MainThread"\n    wait (/lib/threading.py:2)\n    f (/w/a.py:7)\n'
    )
    assert stack_frame(text, "/w") == ("a.py", 7)
    assert stack_frame(text.replace(': "MainThread"', "").replace(': "Worker"', ""), "/w") == ("a.py", 7)
