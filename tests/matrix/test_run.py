"""`portmatrix run` as a user meets it: exit codes, options, what is printed, and what does not disturb it."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from matrix import journal, judge
from tests.matrix.toy import LIMIT_S, Toy, counts, train

FAILS = "import toyframe\nraise ValueError('it is wrong')\n"
UNOBSERVED = "import os, toyframe\nos.write(1, b'step=1 loss=1.0\\n')\n"  # a tool's error: nobody can vouch for it
WAITS = train(before="open('began', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.02)")


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {LIMIT_S:.0f} s for: {what}"
        time.sleep(0.02)
    return found


def plain(toy: Toy, text: str) -> list[str]:
    """Lines of output without what differs from run to run."""
    text = re.sub(r"\d{8}T\d{6}", "TIME", text.replace(str(toy.folder), "DIR"))
    text = re.sub(r"[\d,]+ examples/s", "N examples/s", re.sub(r" \(\d+ s\)|\d+ min \d+ s", "", text))
    return [line.rstrip() for line in text.splitlines()]


# --- exit codes ---


def test_a_run_in_which_all_is_as_expected(toy: Toy) -> None:
    toy.workload("good")
    toy.workload("needs", FAILS, train())
    toy.write()
    ran = toy.run()
    assert plain(toy, ran.stdout) == [
        "portmatrix toy: 2 cells -> DIR/results/TIME-toy",
        "[1/2] ok    good/toy/cpu/single  as-is: device-agnostic source",
        "[2/2] port  needs/toy/cpu/single  ported: port.py (+8 -1)",
        "measuring: 2 processes, one at a time",
        "[1/2] good/toy/cpu/single  process 1: N examples/s",
        "[2/2] needs/toy/cpu/single  process 1: N examples/s",
        "",
        "2 cells: 1 as-is, 1 ported; 2 executed; all as expected;",
        "results: DIR/results/TIME-toy",
    ]
    assert (ran.returncode, ran.stderr) == (0, "")
    assert toy.tries() == [
        ("good", 1, "correctness", "train.py", "pass"),
        ("needs", 1, "correctness", "train.py", "fail"),
        ("needs", 2, "correctness", "port.py", "pass"),
        ("good", 2, "measurement", "train.py", "pass"),
        ("needs", 3, "measurement", "port.py", "pass"),
    ]
    assert toy.records("end")[0]["exit_code"] == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_failure_is_shown_with_the_users_own_line(toy: Toy, workers: str) -> None:
    toy.workload("bad", FAILS)
    toy.write()
    ran = toy.run("-n", workers)
    assert ran.returncode == 1
    shown = plain(toy, ran.stdout)
    begin = shown.index("[1/1] FAIL  bad/toy/cpu/single  broken: exception: ValueError: it is wrong")
    assert shown[begin + 1 : begin + 5] == [
        "          exception: ValueError: it is wrong",
        "          at train.py:2",
        "               1 import toyframe",
        "          >    2 raise ValueError('it is wrong')",
    ]
    assert shown[begin + 5].startswith("          by hand: cd DIR/workloads/bad && ")


def test_an_expected_failure_is_as_expected_and_an_unexpected_pass_is_not(toy: Toy) -> None:
    toy.workload("bad", FAILS)
    toy.workload("good")
    expected = {"cause": "exception", "reason": "known for long"}
    toy.write(expect=[{"match": {"workload": "bad"}, **expected}])
    assert toy.run().returncode == 0
    toy.write(expect=[{"match": {"workload": ["bad", "good"]}, **expected}])
    ran = toy.run()
    assert ran.returncode == 1
    assert "passes, although it is expected to fail: remove the expectation" in ran.stdout
    toy.write(expect=[{"match": {"workload": "bad"}, **expected, "cause": "timeout"}])
    ran = toy.run()
    assert ran.returncode == 1
    assert "expected was timeout" in ran.stdout


def test_a_definition_that_is_wrong_is_a_usage_error(toy: Toy) -> None:
    toy.workload("good")
    toy.write(matrix={"workload": ["god"], "backend": ["toy"], "accelerator": ["cpu"], "layout": ["single"]})
    ran = toy.run()
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "did you mean 'good'?" in ran.stderr
    assert not toy.results.exists()


@pytest.mark.parametrize("words", [["--no-such-option"], ["-k", "(("], ["-n", "0"], ["--select", "backend=x"]])
def test_wrong_options_are_a_usage_error(toy: Toy, words: list[str]) -> None:
    toy.workload("good")
    toy.write()
    ran = toy.run(*words)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr + ran.stdout


def test_a_run_that_can_execute_nothing_says_so(toy: Toy) -> None:
    toy.workload("good")
    toy.write(matrix={"workload": ["good"], "backend": ["toy"], "accelerator": ["tpu"], "layout": ["single"]})
    ran = toy.run()
    assert ran.returncode == 3
    assert "1 cells: 1 unproven; 0 executed; nothing was executed" in ran.stdout
    assert [a["outcome"] for a in toy.records("attempt")] == ["unavailable"]


def test_absence_of_what_is_required_is_not_as_expected(toy: Toy) -> None:
    toy.workload("good")
    axes = {"workload": ["good"], "backend": ["toy"], "accelerator": ["cpu", "tpu"], "layout": ["single"]}
    toy.write(matrix=axes, require={"accelerator": ["tpu"]})
    ran = toy.run()
    assert ran.returncode == 1
    assert "required by the definition, and not executed" in ran.stdout


def test_what_nobody_can_vouch_for_is_the_tools_error(toy: Toy) -> None:
    toy.workload("odd", UNOBSERVED)
    toy.workload("good")
    toy.write()
    ran = toy.run()
    assert ran.returncode == 4
    assert "ERR   odd/toy/cpu/single  error: progress was printed, but not through" in ran.stdout
    assert toy.records("end")[0]["exit_code"] == 4


def test_a_measurement_that_fails_breaks_its_cell(toy: Toy) -> None:
    toy.workload("long", train(after="if options.steps > 3: raise ValueError('late')"))
    toy.write(run={"steps": 3, "measure": {"processes": 3, "steps": 24, "log_every": 2}})
    ran = toy.run()
    assert ran.returncode == 1
    assert "1 cells: 1 broken; 1 executed; not all as expected" in ran.stdout
    assert [each[2:] for each in toy.tries()] == [
        ("correctness", "train.py", "pass"),
        ("measurement", "train.py", "fail"),  # the other two processes would say the same
    ]


# --- options ---


def test_cells_side_by_side_are_all_recorded_once(toy: Toy) -> None:
    for number in range(4):
        toy.workload(f"w{number}", FAILS if number == 2 else None, train())
    toy.write()
    ran = toy.run("-n", "2")
    assert ran.returncode == 0
    assert plain(toy, ran.stdout)[0] == "portmatrix toy: 4 cells, 2 at a time -> DIR/results/TIME-toy"
    assert "nodes" not in ran.stdout
    tried = [each for each in toy.tries() if each[2] == "correctness"]
    assert sorted(tried) == [
        ("w0", 1, "correctness", "train.py", "pass"),
        ("w1", 1, "correctness", "train.py", "pass"),
        ("w2", 1, "correctness", "train.py", "fail"),
        ("w2", 2, "correctness", "port.py", "pass"),
        ("w3", 1, "correctness", "train.py", "pass"),
    ]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_x_stops_at_the_first_failure_and_leaves_the_run_partial(toy: Toy, workers: str) -> None:
    toy.workload("a-bad", FAILS)
    for number in range(6):
        toy.workload(f"w{number}")
    toy.write()
    ran = toy.run("-x", "-n", workers)
    assert ran.returncode == 1
    assert len(toy.records("attempt")) < 7
    assert not toy.records("end")
    assert "measuring" not in ran.stdout


def test_lf_runs_what_failed_last_time(toy: Toy) -> None:
    toy.workload("good")
    toy.workload("bad", FAILS)
    toy.write()
    toy.run()
    time.sleep(1.1)  # runs of one second are told apart by a number, but here the newest is meant
    toy.run("--lf")
    assert [each[0] for each in toy.tries()] == ["bad"]


def test_k_and_select_choose_cells(toy: Toy) -> None:
    for name in ("good", "goodness", "bad"):
        toy.workload(name)
    toy.write()
    ran = toy.run("-k", "good")
    assert {each[0] for each in toy.tries()} == {"good", "goodness"}
    assert "3 cells: 2 as-is, 1 unproven" in ran.stdout
    shutil.rmtree(toy.results)
    ran = toy.run("--select", "workload=good")
    assert {each[0] for each in toy.tries()} == {"good"}
    assert [cell["axes"]["workload"] for cell in toy.records("run")[0]["plan"]] == ["good"]
    shutil.rmtree(toy.results)
    assert toy.run("-k", "nothing").returncode == 3


def test_junit_xml_is_valid_and_says_the_same(toy: Toy) -> None:
    toy.workload("good")
    toy.workload("bad", "import toyframe\nraise ValueError('\\x1b[31m<&\\x00')")
    axes = {"workload": ["good", "bad"], "backend": ["toy"], "accelerator": ["cpu", "tpu"], "layout": ["single"]}
    toy.write(matrix=axes)
    toy.run("--junitxml", "j.xml", "-n", "2")
    cases = {
        case.get("name"): next(iter([child.tag for child in case]), "passed")
        for case in ElementTree.parse(toy.folder / "j.xml").iter("testcase")
    }
    assert cases == {
        "good/toy/cpu/single": "passed",
        "good/toy/tpu/single": "skipped",
        "bad/toy/cpu/single": "failure",
        "bad/toy/tpu/single": "skipped",
    }


def test_a_budget_that_is_used_up_starts_nothing_more(toy: Toy) -> None:
    toy.workload("slow", train(before="time.sleep(6.5)"))
    toy.workload("w1")
    toy.workload("w2")
    toy.write()
    ran = toy.run("--budget", "0.1")  # 6 s: the first cell begins within it, and ends after it
    assert [each[0] for each in toy.tries()] == ["slow"]
    assert "[2/3] --    w1/toy/cpu/single  unproven: not run" in ran.stdout
    assert "the budget is used up: 2 cells were not run, not everything was measured; --resume goes on" in ran.stdout
    assert "; not all was run; " in ran.stdout
    assert ran.returncode == 5
    assert not toy.records("end")  # so that the report says partial
    assert toy.run("--resume").returncode == 0


def test_live_shows_the_output_of_the_one_cell(toy: Toy) -> None:
    toy.workload("good")
    toy.workload("other")
    toy.write()
    ran = toy.run("--live", "--select", "workload=good")
    assert ran.returncode == 0
    assert "step=3 loss=0.333333333 examples=8\n" in ran.stderr
    assert toy.run("--live").returncode == 2


def test_axis_values_with_odd_characters_are_cells_like_others(toy: Toy) -> None:
    toy.workload("good", train(before="print('value', os.environ['ODD'])"))
    values = ["a::b", "[x]", "ü漢", "a%20b", "50%", "a'b", "$HOME"]
    axes = {"workload": ["good"], "backend": ["toy"], "accelerator": ["cpu"], "layout": ["single"], "odd": values}
    toy.write(matrix=axes, axes={"odd": {"environment": "ODD"}}, run={"steps": 3, "measure": {"processes": 1}})
    ran = toy.run("-n", "2", "--junitxml", "j.xml", "--budget", "100")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = {a["axes"]["odd"] for a in toy.records("attempt") if a["outcome"] == "pass"}
    assert passed == set(values)


# --- what is printed, and where ---


def test_plain_lines_where_there_is_no_terminal(toy: Toy) -> None:
    toy.workload("bad", FAILS)
    toy.write()
    for variables in ({}, {"CI": "true"}, {"NO_COLOR": "1"}):
        toy.environment = variables
        assert "\x1b" not in toy.run().stdout


def on_terminal(toy: Toy, *words: str, columns: int = 100, term: str = "xterm") -> tuple[int, str]:
    """Run on a terminal of its own; returns the exit code and all that was written to it."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    toy.environment |= {"TERM": term}
    process = toy.start("run", str(toy.definition), *words, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen, deadline = b"", time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                data = os.read(ours, 65536)
            except OSError:
                break
            if not data:
                break
            seen += data
    os.close(ours)
    return process.wait(LIMIT_S), seen.decode()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_terminal_shows_a_status_line_and_is_left_clean(toy: Toy, workers: str) -> None:
    toy.workload("a-good")
    toy.workload("slow", train(before="time.sleep(2.5)"))
    toy.workload("slower", train(before="time.sleep(2.5)"))
    toy.write()
    code, seen = on_terminal(toy, "-n", workers, columns=100)
    assert code == 0
    assert re.search(r"[12]/3 cells  [12] as-is  about \d+ s left  now: slow", seen)
    drawn = seen.replace("\r\n", "\n")
    assert drawn.count("\x1b[2K") >= 2
    for line in drawn.split("\n"):  # whatever stood there as status was erased before the line was written
        last = re.sub(r"\x1b\[\d*m", "", line.rpartition("\r\x1b[2K")[2])
        assert "now:" not in last
    assert "\x1b[32mok" in seen  # green


def test_a_narrow_terminal_never_wraps_the_status_line(toy: Toy) -> None:
    toy.workload("slow", train(before="time.sleep(2.5)"))
    toy.write()
    _, seen = on_terminal(toy, columns=12)
    status = re.findall(r"\x1b\[2m(0/1 [^\x1b]*)", seen)
    assert status
    assert max(map(len, status)) == 11


def test_a_dumb_terminal_gets_plain_lines(toy: Toy) -> None:
    toy.workload("slow", train(before="time.sleep(1.5)"))
    toy.write()
    _, seen = on_terminal(toy, term="dumb")
    assert "\x1b[2K" not in seen


def test_a_reader_that_goes_away_does_not_end_the_run(toy: Toy) -> None:
    toy.workload("a")
    toy.workload("b")
    toy.write()
    process = toy.start("run", str(toy.definition))
    assert process.stdout
    assert process.stderr
    process.stdout.readline()
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    assert process.wait(LIMIT_S) == 0
    assert counts(toy.records()) == {"run": 1, "attempt": 4, "end": 1}


# --- the surroundings ---


def test_the_users_pytest_settings_and_files_are_theirs(toy: Toy) -> None:
    toy.workload("good")
    toy.write()
    for name, text in {
        "conftest.py": "raise SystemExit('conftest')",
        "pytest.ini": "[pytest]\naddopts = --no-such-option\n",
        "setup.cfg": "[tool:pytest]\naddopts = --no-such-option\n",
        "tox.ini": "[pytest]\naddopts = --no-such-option\n",
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--no-such-option'\n",
        "json.py": "raise SystemExit('json')",
        "yaml.py": "raise SystemExit('yaml')",
        "matrix/__init__.py": "raise SystemExit('matrix')",
        "reports/__init__.py": "raise SystemExit('reports')",
        "matrix.py": "raise SystemExit('matrix')",
    }.items():
        path = toy.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    toy.environment = {"PYTEST_ADDOPTS": "--no-such-option", "PYTEST_PLUGINS": "no_such_plugin"}
    for workers in ("1", "2"):
        ran = toy.run("-n", workers)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not list(toy.folder.glob("**/__pycache__/conftest*"))
    assert not (toy.folder / ".pytest_cache").exists()


def test_a_results_folder_that_cannot_be_made_is_a_usage_error(toy: Toy) -> None:
    toy.workload("good")
    toy.write()
    toy.results.write_text("a file")
    ran = toy.run()
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"portmatrix: cannot write results to {toy.results}: Not a directory\n"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_results_folder_that_is_deleted_during_the_run_is_the_tools_error(toy: Toy, workers: str) -> None:
    folder = toy.workload("a", WAITS)
    for name in "bcd":
        toy.workload(name)
    toy.write()
    process = toy.start("run", str(toy.definition), "-n", workers)
    until((folder / "began").exists, "the first cell")
    shutil.rmtree(toy.results, ignore_errors=True)
    (folder / "go").touch()
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 4
    assert re.search(r"the journal .* cannot be written: No such file or directory|was replaced", err)
    assert "Traceback" not in err


FULL = """
mount -t tmpfs -o size=1m none "$1" || exit 77
cd "$2" && shift 2 && exec "$@"
"""


@pytest.mark.parametrize("when", ["at the start", "in the middle"])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_is_told_in_one_sentence(toy: Toy, when: str, workers: str) -> None:
    if not shutil.which("unshare"):
        pytest.skip("there is no command 'unshare'")
    fill = """
    import glob
    try:
        with open(os.environ["RESULTS"] + "/filler", "wb") as file:
            while True: file.write(b"x" * 512); file.flush()
    except OSError as error: pass
    """
    if when == "at the start":
        toy.workload("a", "# " + "x" * 1_000_000)  # a journal carries the scripts
    else:
        toy.workload("a")
        toy.workload("b", train(before=fill))
    for name in "cdef":
        toy.workload(name)
    toy.write()
    toy.results.mkdir()
    toy.environment = {"RESULTS": str(toy.results)}
    command = toy.command("run", str(toy.definition), "-n", workers)
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", FULL, "sh", str(toy.results), str(toy.folder), *command],
        env=toy.variables(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if ran.returncode in (1, 77) and ("unshare:" in ran.stderr or "mount:" in ran.stderr):
        pytest.skip("no mount namespace may be made here")
    assert ran.returncode == 4, ran.stdout + ran.stderr
    assert "No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr + ran.stdout


def test_two_runs_at_once_share_a_results_folder(toy: Toy) -> None:
    toy.workload("good")
    toy.workload("slow", train(before="time.sleep(0.5)"))
    toy.write()
    both = [toy.start("run", str(toy.definition)) for _ in range(2)]
    outputs = [process.communicate(timeout=LIMIT_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len(toy.journals()) == 2
    for path in toy.journals():
        found = journal.read(path)
        assert not found.damaged
        assert len(found.attempts) == 4
        assert {attempt.run for attempt in found.attempts} == {path.parent.name}


# --- processes that are killed ---


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_ends_the_run_at_once_and_leaves_no_process(toy: Toy, workers: str) -> None:
    folders = [toy.workload(name, WAITS) for name in ("a", "b")][: int(workers)]
    toy.write()
    process = toy.start("run", str(toy.definition), "-n", workers, start_new_session=True)
    until(lambda: all((folder / "began").exists() for folder in folders), "the cells")
    below = children(process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the controller and its workers
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "interrupted" in out
    assert "Traceback" not in err
    until(lambda: not any(each.is_running() for each in below), "all processes to be gone")
    assert counts(toy.records()) == {"run": 1}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_controller_that_is_killed_loses_only_what_was_running(toy: Toy, workers: str) -> None:
    toy.workload("a")
    toy.workload("b")
    folder = toy.workload("c", WAITS)
    toy.write()
    process = toy.start("run", str(toy.definition), "-n", workers)
    until((folder / "began").exists, "the last cell")
    until(lambda: len(toy.records("attempt")) == 2, "the first two cells")
    below = children(process)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    until(lambda: not any(each.is_running() for each in below), "all processes to be gone")
    assert counts(toy.records()) == {"run": 1, "attempt": 2}


def test_a_worker_that_is_killed_leaves_an_error_and_no_process(toy: Toy) -> None:
    folder = toy.workload("a", WAITS)
    for name in "bcd":
        toy.workload(name)
    toy.write()
    process = toy.start("run", str(toy.definition), "-n", "2")
    until((folder / "began").exists, "the first cell")
    cell = next(each for each in children(process) if str(folder) in "".join(each.cwd() or ""))
    chain = [cell, *cell.parents()]
    worker = next(each for each in chain if each.ppid() == process.pid)
    below = worker.children(recursive=True)
    worker.kill()
    out, err = process.communicate(timeout=LIMIT_S)
    until(lambda: not any(each.is_running() for each in below), "the worker's processes to be gone")
    assert process.returncode == judge.EXIT_TOOL_ERROR, out + err
    assert re.search(r"ERR   a/toy/cpu/single  error: .*crashed", out)
    tried = {each[0]: each[4] for each in toy.tries() if each[2] == "correctness"}
    assert tried == {"a": "error", "b": "pass", "c": "pass", "d": "pass"}


def test_the_start_imports_nothing_that_is_slow(toy: Toy) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from matrix.cli import main\nmain(['plan', 'smoke'])\n"
        "slow = 'pytest _pytest xdist scipy numpy torch jax jinja2'.split()\n"
        "print([name for name in slow if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_an_observer_that_breaks_is_the_tools_error_with_its_reason(toy: Toy) -> None:
    toy.workload("good")
    toy.write()
    observer = toy.folder / "site" / "toy_observer.py"
    observer.write_text(
        observer.read_text().replace("def seen(self):", "def seen(self):\n        raise KeyError('new')")
    )
    ran = toy.run()
    assert ran.returncode == 4
    assert "(the observer broke: KeyError: 'new')" in ran.stdout
