"""A run that was interrupted goes on where it was: nothing is lost but what was running, nothing is done twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from matrix import journal
from matrix.errors import UsageError
from matrix.session import Options, Session, _age, make_plan, pack, unpack
from tests.matrix.toy import LIMIT_S, REFERENCE, Toy, counts, train

WAITS = train(before="open('began', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.02)")
WAITS_WHEN_MEASURED = train(
    before="if options.steps > 3:\n    open('began', 'w').close()\n    while not os.path.exists('go'): time.sleep(0.02)"
)
FAILS = "import toyframe\nraise ValueError('it is wrong')\n"


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {LIMIT_S:.0f} s for: {what}"
        time.sleep(0.02)
    return found


def stop(toy: Toy, began: Path, number: signal.Signals, *words: str) -> None:
    """Start a run, and end it by a signal once a script has begun."""
    process = toy.start("run", str(toy.definition), *words)
    until(began.exists, "the script that waits")
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    began.unlink()
    (began.parent / "go").touch()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda n: n.name)
def test_a_run_that_was_ended_is_finished_by_resume(toy: Toy, number: signal.Signals) -> None:
    toy.workload("a")
    toy.workload("b", FAILS, train())
    folder = toy.workload("c", WAITS)
    toy.write()
    stop(toy, folder / "began", number)
    known = [
        ("a", 1, "correctness", "train.py", "pass"),
        ("b", 1, "correctness", "train.py", "fail"),
        ("b", 2, "correctness", "port.py", "pass"),
    ]
    assert toy.tries() == known
    assert not toy.records("end")

    # The script wrote files into its folder; these are not the data that the attempts had.
    (folder / "go").unlink()
    (folder / "train.py").write_text(train())
    ran = toy.run("--resume")
    assert ran.returncode == 0
    assert "3 cells, resumed (3 attempts known) -> " in ran.stdout
    assert len(toy.journals()) == 1
    assert toy.tries() == [
        *known,
        ("c", 1, "correctness", "train.py", "pass"),
        ("a", 2, "measurement", "train.py", "pass"),
        ("b", 3, "measurement", "port.py", "pass"),
        ("c", 2, "measurement", "train.py", "pass"),
    ]
    assert counts(toy.records()) == {"run": 1, "attempt": 7, "resume": 1, "end": 1}

    ran = toy.run("--resume")  # nothing is left to do
    assert ran.returncode == 0
    assert counts(toy.records()) == {"run": 1, "attempt": 7, "resume": 2, "end": 2}


def test_a_measurement_that_was_ended_is_finished_by_resume(toy: Toy) -> None:
    toy.settings = {"run": {"steps": 3, "measure": {"processes": 2, "steps": 24, "log_every": 2}}}
    toy.workload("a")
    folder = toy.workload("b", WAITS_WHEN_MEASURED)
    toy.write()
    stop(toy, folder / "began", signal.SIGKILL)
    assert [each[2] for each in toy.tries()] == ["correctness", "correctness", "measurement"]
    (folder / "go").unlink()  # a file beside the script counts as its data
    os.utime(folder / "train.py")
    process = toy.start("run", str(toy.definition), "--resume")
    until((folder / "began").exists, "the measurement")
    (folder / "go").touch()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    measured = [each[:2] for each in toy.tries() if each[2] == "measurement"]
    assert sorted(measured) == [("a", 2), ("a", 3), ("b", 2), ("b", 3)]
    assert [each[:2] for each in toy.tries() if each[2] == "correctness"] == [("a", 1), ("b", 1)]


def test_resume_repeats_what_an_edit_concerns_and_nothing_else(toy: Toy) -> None:
    folder = toy.workload("a", None, train())
    toy.workload("b")
    elsewhere = toy.folder / "elsewhere"
    elsewhere.mkdir()
    (folder / "data").symlink_to(elsewhere)
    toy.write()
    metadata = toy.folder / "site" / "toyframe-1.0.dist-info" / "METADATA"
    described = folder / "workload.yaml"
    measure = {"processes": 1, "steps": 24, "log_every": 2}

    def replace(path: Path, old: str, new: str) -> None:
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    edits: list[tuple[str, Callable[[], object], list[str]]] = [
        ("script", lambda: (folder / "train.py").write_text(train() + "# changed\n"), ["a"]),
        ("port that is not needed", lambda: (folder / "port.py").write_text(train() + "# changed\n"), []),
        ("a helper", lambda: (folder / "helper.py").write_text("X = 2\n"), ["a"]),
        ("data behind a link", lambda: (elsewhere / "data.csv").write_text("2\n"), ["a"]),
        ("reference", lambda: replace(folder / "reference.csv", "40,0.025", "40,0.02500001"), ["a"]),
        ("tolerance", lambda: replace(described, "0.0001", "0.001"), ["a"]),
        ("about", lambda: replace(described, "made for a test", "made for another test"), []),
        ("version of a package", lambda: replace(metadata, "Version: 1.0", "Version: 1.1"), ["a", "b"]),
        ("settings", lambda: toy.write(run={"steps": 4, "timeout": 60, "measure": measure}), ["a", "b"]),
        ("comment", lambda: replace(toy.definition, "matrix:", "# a comment\nmatrix:"), []),
    ]
    assert toy.run().returncode == 0
    for name, edit, again in edits:
        before = len(toy.tries())
        edit()
        ran = toy.run("--resume")
        assert ran.returncode == 0, (name, ran.stdout, ran.stderr)
        assert [each[0] for each in toy.tries()[before:]] == again * 2, name  # in both phases
    numbers = [each[1] for each in toy.tries() if each[0] == "a"]
    assert numbers == list(range(1, 17))


def test_a_reference_that_made_the_measurement_fail_is_mended_and_measured_again(toy: Toy) -> None:
    folder = toy.workload("a")
    (folder / "reference.csv").write_text(REFERENCE.replace("24,", "24,9"))  # only the longer measurement comes so far
    toy.write()
    assert toy.run().returncode == 1
    assert [each[2:] for each in toy.tries()][1] == ("measurement", "train.py", "fail")
    (folder / "reference.csv").write_text(REFERENCE)
    assert toy.run("--resume").returncode == 0
    assert [each[1:3] + each[4:] for each in toy.tries()][2:] == [
        (3, "correctness", "pass"),
        (4, "measurement", "pass"),
    ]


def test_resume_with_another_selection_keeps_the_rows_of_the_first(toy: Toy) -> None:
    for name in "abc":
        toy.workload(name)
    toy.write()
    toy.run("--select", "workload=a")
    ran = toy.run("--resume", "--select", "workload=b")
    assert ran.returncode == 0
    assert "1 cells: 1 as-is" in ran.stdout
    found = journal.read(toy.journals()[-1])
    assert [cell.axes["workload"] for cell in found.run.plan] == ["a", "b"]
    assert {attempt.axes["workload"] for attempt in found.attempts} == {"a", "b"}
    ran = toy.run("--resume")
    assert "3 cells: 3 as-is" in ran.stdout
    assert [each[0] for each in toy.tries() if each[2] == "correctness"] == ["a", "b", "c"]


def test_resume_without_a_run_says_so(toy: Toy) -> None:
    toy.workload("a")
    toy.write()
    ran = toy.run("--resume")
    assert ran.returncode == 2
    assert ran.stderr == f"portmatrix: --resume: there is no run of toy under {toy.results}\n"


def test_resume_on_another_machine_runs_there_what_is_known_of_the_first(toy: Toy) -> None:
    toy.workload("a")
    toy.write()
    toy.run()
    path = toy.journals()[-1]
    mine = toy.records("run")[0]["machine"]
    path.write_text(path.read_text().replace(mine, "elsewhere-123456"))
    assert toy.run("--resume").returncode == 0
    assert [(a["machine"], a["attempt"], a["phase"]) for a in toy.records("attempt")] == [
        ("elsewhere-123456", 1, "correctness"),
        ("elsewhere-123456", 2, "measurement"),
        (mine, 3, "correctness"),
        (mine, 4, "measurement"),
    ]


def test_what_passed_elsewhere_is_not_measured_where_it_cannot_run(toy: Toy) -> None:
    toy.workload("a")
    toy.write(matrix={"workload": ["a"], "backend": ["toy"], "accelerator": ["cpu"], "layout": ["single"]})
    toy.run()
    path = toy.journals()[-1]
    text = path.read_text().replace(toy.records("run")[0]["machine"], "elsewhere-123456").replace("/cpu/", "/tpu/")
    path.write_text("\n".join(line for line in text.splitlines() if '"measurement"' not in line) + "\n")
    toy.write(matrix={"workload": ["a"], "backend": ["toy"], "accelerator": ["tpu"], "layout": ["single"]})
    ran = toy.run("--resume")
    assert "measuring" not in ran.stdout
    assert [a["outcome"] for a in toy.records("attempt")] == ["pass", "unavailable"]


def test_a_torn_last_line_is_left_out_and_swallows_nothing(toy: Toy) -> None:
    toy.workload("a")
    toy.workload("b")
    toy.write()
    toy.run()
    path = toy.journals()[-1]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:100])  # run, a, and a part of b
    assert toy.run("--resume").returncode == 0
    found = journal.read(path)
    assert found.damaged == ["line 3: JSONDecodeError"]
    assert [each[:3] for each in toy.tries()] == [
        ("a", 1, "correctness"),
        ("b", 1, "correctness"),
        ("a", 2, "measurement"),
        ("b", 2, "measurement"),
    ]
    assert not found.partial


# --- without processes ---


def opened(toy: Toy, **more: Any) -> Session:
    options = Options(str(toy.definition), results=toy.results, **more)
    return Session(options, make_plan(options), {})


@pytest.fixture
def planned(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A definition over a shipped workload, so that the toy's backend need not be installed here."""
    toy.definition.write_text(
        "matrix: {workload: [digits], backend: [torch], accelerator: [cpu, tpu], layout: [single]}\nrun: {steps: 3}\n"
    )
    return toy


def test_runs_of_one_second_have_folders_of_their_own_and_the_last_is_the_newest(planned: Toy) -> None:
    sessions = [opened(planned) for _ in range(12)]
    names = [session.folder.name for session in sessions]
    assert len(set(names)) == 12
    for session in sessions:
        session.close()
    resumed = opened(planned, resume=True)
    assert resumed.folder.name == names[-1]
    resumed.close()


def test_journals_are_sorted_by_time_and_by_number() -> None:
    names = ["20270101T000000-cpu-2", "20270101T000000-cpu-10", "20270101T000000-cpu", "20261231T235959-cpu-3"]
    paths = sorted((Path(name, "journal.jsonl") for name in names), key=_age)
    assert [path.parent.name for path in paths] == [
        "20261231T235959-cpu-3",
        "20270101T000000-cpu",
        "20270101T000000-cpu-2",
        "20270101T000000-cpu-10",
    ]


def test_a_run_that_is_open_cannot_be_resumed_beside_itself(planned: Toy) -> None:
    session = opened(planned)
    with pytest.raises(UsageError, match="another portmatrix is running in this folder"):
        opened(planned, resume=True)
    session.close()


def test_a_process_of_the_run_knows_what_the_controller_knows(planned: Toy) -> None:
    from matrix.environments import Interpreter

    session = opened(planned)
    session.interpreters = {"torch": Interpreter("/x/python", "current", "3.11.7", {"torch": "2.6"}, {"a": [1]})}
    plan, context = unpack(pack(session))
    assert [cell.id for cell in plan.cells] == ["digits/torch/cpu/single", "digits/torch/tpu/single"]
    assert context == session.context()
    session.close()
