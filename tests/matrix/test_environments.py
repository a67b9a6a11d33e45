"""Interpreters are asked what they have; one that breaks, hangs, floods or lies is told, and never stops the run."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from matrix import environments
from matrix.backends import Backend
from matrix.environments import FRAMEWORKS, Compiler, Interpreter, find, parse_python_options
from matrix.errors import UsageError
from tests.matrix.test_worker import other_pythons
from tests.matrix.toy import LIMIT_S, Toy, install, train


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def toy_backend(site: Path) -> Backend:
    return Backend(
        name="toy",
        framework="toy",
        distribution="toyframe",
        observer=site / "toy_observer.py",
        probe=site / "toy_probe.py",
    )


@pytest.fixture
def venv(tmp_path: Path, site: Path) -> Path:
    """A virtual environment that has the toy framework and nothing of this tool."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=LIMIT_S)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "toy.pth").write_text(f"{site}\n")
    return folder


def wrapper(tmp_path: Path, before: str = "", after: str = "", name: str = "python-wrapped") -> str:
    """An interpreter that does something before or after each answer."""
    path = tmp_path / name
    path.write_text(f'#!/bin/sh\n{before}\n{sys.executable} "$@"\ncode=$?\n{after}\nexit $code\n')
    path.chmod(0o755)
    return str(path)


# --- which interpreter ---


def test_the_option_takes_an_interpreter_or_a_virtual_environment(venv: Path, toy_backend: Backend) -> None:
    known = {"toy": toy_backend}
    python = str(venv / "bin" / "python")
    assert parse_python_options([f"toy={venv}"], known) == {"toy": python}
    assert parse_python_options([f"toy={python}"], known) == {"toy": python}
    assert os.path.islink(python)  # kept as it is: resolved, it would be another environment


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("toy", "--python takes BACKEND=PATH, got 'toy'"),
        ("toy=", "--python takes BACKEND=PATH, got 'toy='"),
        ("tay=/x", "--python: unknown backend 'tay': did you mean 'toy'?"),
        ("toy=/no/such/python", "--python toy: '/no/such/python' is no interpreter that can be executed"),
        ("toy=/dev/null", "--python toy: '/dev/null' is no interpreter that can be executed"),
        ("toy=/usr", "--python toy: '/usr' is no interpreter that can be executed"),
    ],
)
def test_an_option_that_names_no_interpreter_is_a_usage_error(option: str, message: str, toy_backend: Backend) -> None:
    if option == "toy=/usr" and Path("/usr/bin/python").exists():
        pytest.skip("/usr is a fine environment here")
    with pytest.raises(UsageError) as caught:
        parse_python_options([option], {"toy": toy_backend})
    assert str(caught.value) == message


def test_the_first_that_has_the_package_is_taken(venv: Path, toy_backend: Backend) -> None:
    python = str(venv / "bin" / "python")
    found = find([toy_backend], {}, {"toy": python})["toy"]
    assert (found.path, found.origin, found.packages, found.trouble) == (
        python,
        "environments",
        {"toyframe": "1.0"},
        None,
    )
    assert found.probe == {"version": "1.0", "devices": {"cpu": 1}, "device": "cpu"}
    found = find([toy_backend], {"toy": python}, {"toy": sys.executable})["toy"]
    assert (found.path, found.origin) == (python, "--python")


def test_an_environment_of_the_definition_that_is_not_there_is_passed_over(toy_backend: Backend) -> None:
    psutil_backend = dataclasses.replace(toy_backend, distribution="psutil")
    found = find([psutil_backend], {}, {"toy": "/no/such/python"})["toy"]
    assert (found.path, found.origin) == (sys.executable, "current")


def test_an_interpreter_without_the_package_is_absence_in_words(toy_backend: Backend) -> None:
    found = find([toy_backend], {})["toy"]
    assert found.path is None
    assert found.absent == f"toyframe is not installed: {sys.executable} has no package 'toyframe'"


def test_what_is_named_on_the_command_line_is_not_replaced_by_another(toy_backend: Backend, venv: Path) -> None:
    found = find([toy_backend], {"toy": sys.executable}, {"toy": str(venv / "bin" / "python")})["toy"]
    assert found.path is None


def test_a_compiler_is_looked_for_in_the_interpreter_named_for_it_then_in_its_backends(
    tmp_path: Path, site: Path, venv: Path, toy_backend: Backend
) -> None:
    metadata = tmp_path / "more" / "toycompiler-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: toycompiler\nVersion: 1.0\n")
    python, full = str(venv / "bin" / "python"), wrapper(tmp_path, f"export PYTHONPATH={site}:{tmp_path / 'more'}")
    compiler = Compiler(toy_backend, "toy-tpu", ("toycompiler",))

    def path(chosen: dict[str, str], defined: dict[str, str]) -> str | None:
        return find([], chosen, defined, [compiler])["toy-tpu"].path

    assert path({}, {"toy-tpu": full, "toy": python}) == full
    assert path({}, {"toy-tpu": python, "toy": full}) == full  # the first that has all of it
    assert path({}, {"toy": python}) == python  # what is missing is said where it is needed
    assert path({"toy": python}, {"toy-tpu": full}) == python
    assert path({"toy": full, "toy-tpu": python}, {}) == python
    assert parse_python_options([f"toy-tpu={python}"], ["toy", "toy-tpu"]) == {"toy-tpu": python}


def test_an_environment_without_the_tool_runs_cells_and_is_recorded(tmp_path: Path, venv: Path) -> None:
    toy = Toy(tmp_path / "run")
    none = "try: import matrix\nexcept ImportError: pass\nelse: raise SystemExit('ours is importable')"
    toy.workload("good", train(before=none))
    toy.write(environments={"toy": {"python": str(venv / "bin" / "python")}})
    (toy.folder / "site" / "toyframe-1.0.dist-info" / "METADATA").unlink()  # it is not in the current one
    command = toy.command("run", str(toy.definition))
    own = {k: v for k, v in toy.variables().items() if k != "PYTHONPATH"}
    command[3] = command[3].replace(
        "sys.path.insert(0,", f"sys.path.insert(0, {str(toy.folder / 'site')!r}); sys.path.insert(0,"
    )
    ran = subprocess.run(command, cwd=toy.folder, env=own, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    recorded = [a["environment"]["interpreter"] for a in toy.records("attempt")]
    assert recorded == [str(venv / "bin" / "python")] * 2
    host = toy.records("run")[0]["host"]["interpreters"]["toy"]
    assert (host["path"], host["origin"]) == (str(venv / "bin" / "python"), "environments")


@pytest.mark.parametrize("python", other_pythons(), ids=lambda path: Path(path).name)
def test_an_interpreter_of_another_version_runs_cells(tmp_path: Path, python: str) -> None:
    toy = Toy(tmp_path / "run")
    toy.workload("good", train(before="print(sys.version_info[:2])"))
    toy.workload("bad", "import toyframe\ndef f(x): return x.shape\nf(3)\n")
    toy.write()
    ran = toy.run("--python", f"toy={python}")
    assert "2 cells: 1 as-is, 1 broken; 2 executed" in ran.stdout, ran.stdout + ran.stderr
    failed = next(a for a in toy.records("attempt") if a["outcome"] == "fail")
    assert (failed["failure"]["message"], failed["failure"]["frame"]) == (
        "AttributeError: 'int' object has no attribute 'shape'",
        "train.py:2",
    )
    assert failed["environment"]["interpreter"] == python


# --- what can go wrong when it is asked ---


def asked(backend: Backend, python: str) -> Interpreter:
    return find([backend], {"toy": python})["toy"]


def test_noise_around_an_answer_is_left_out(tmp_path: Path, toy_backend: Backend, venv: Path) -> None:
    noise = "echo 'WARNING: a banner'; printf '\\377\\376 {\"not\": \"it\"}\\n'; echo 3; echo '[1]' >&2"
    path = wrapper(tmp_path, noise, noise)
    Path(path).write_text(Path(path).read_text().replace(sys.executable, str(venv / "bin" / "python")))
    found = asked(toy_backend, path)
    assert (found.packages, found.probe["version"], found.trouble) == ({"toyframe": "1.0"}, "1.0", None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("#!/bin/sh\nexit 3\n", "ended with exit code 3"),
        ("#!/bin/sh\necho 'no licence' >&2; exit 3\n", "no licence"),
        ("#!/bin/sh\necho hello\n", "printed no answer: 'hello\\n'"),
        ("#!/bin/sh\nkill -SEGV $$\n", "died of signal 11"),
        ("#!/no/such/interpreter\n", "cannot be started: No such file or directory"),
        ("not a program", "cannot be started: Exec format error"),
    ],
)
def test_what_is_no_python_is_told(tmp_path: Path, toy_backend: Backend, text: str, reason: str) -> None:
    path = tmp_path / "no-python"
    path.write_text(text)
    path.chmod(0o755)
    found = asked(toy_backend, str(path))
    assert found.absent == f"toyframe is not installed: {path}: {reason}"


@pytest.mark.parametrize(
    ("probe", "trouble"),
    [
        ("raise ImportError('libfoo.so.1: cannot open')", "ImportError: libfoo.so.1: cannot open"),
        ("import os; os.abort()", "died of signal 6"),
        ("import os, sys; print('fatal: driver', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)",
         "died of signal 11: fatal: driver"),
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("print('{}')", "printed no answer: '{}\\n'"),
        ("print('[' * 100_000)", f"printed no answer: {'[' * 199 + chr(10)!r}"),
    ],
)  # fmt: skip
def test_a_framework_that_does_not_come_up_is_told(
    tmp_path: Path, toy_backend: Backend, venv: Path, probe: str, trouble: str
) -> None:
    file = tmp_path / "probe.py"
    file.write_text(probe)
    found = asked(dataclasses.replace(toy_backend, probe=file), str(venv / "bin" / "python"))
    assert found.path == str(venv / "bin" / "python")
    assert found.trouble == trouble
    assert found.probe == {}


def test_a_probe_that_hangs_ends_with_all_that_it_started(
    tmp_path: Path, toy_backend: Backend, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "PROBE_S", 3.0)
    file = tmp_path / "probe.py"
    mark = f"600.{os.getpid()}"
    file.write_text(f"import subprocess; subprocess.run(['sleep', '{mark}'])")
    found = asked(dataclasses.replace(toy_backend, probe=file), str(venv / "bin" / "python"))
    assert found.trouble == "did not answer within 3 s"
    assert not [each for each in psutil.process_iter(["cmdline"]) if mark in (each.info["cmdline"] or [])]


def test_a_probe_that_floods_or_reads_its_input_ends(tmp_path: Path, toy_backend: Backend, venv: Path) -> None:
    file = tmp_path / "probe.py"
    file.write_text("import sys; sys.stdin.read(); print('x' * 10_000_000); print('{\"version\": \"2\"}')")
    found = asked(dataclasses.replace(toy_backend, probe=file), str(venv / "bin" / "python"))
    assert found.probe == {"version": "2"}


def test_ctrl_c_while_interpreters_are_asked_ends_at_once(tmp_path: Path) -> None:
    import signal

    toy = Toy(tmp_path / "run")
    toy.workload("good")
    toy.write()
    mark = f"601.{os.getpid()}"
    probe = f"import subprocess\nopen({str(tmp_path / 'began')!r}, 'w').close()\nsubprocess.run(['sleep', '{mark}'])"
    (toy.folder / "site" / "toy_probe.py").write_text(probe)
    process = toy.start("run", str(toy.definition))
    deadline = time.monotonic() + LIMIT_S
    while not (tmp_path / "began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (130, "", "")
    assert not [each for each in psutil.process_iter(["cmdline"]) if mark in (each.info["cmdline"] or [])]


def test_each_interpreter_and_probe_is_asked_once(toy_backend: Backend, venv: Path, tmp_path: Path) -> None:
    path = wrapper(tmp_path, f"echo x >> {tmp_path / 'asked'}")
    Path(path).write_text(Path(path).read_text().replace(sys.executable, str(venv / "bin" / "python")))
    second = dataclasses.replace(toy_backend, name="toy-compile")
    find([toy_backend, second], {"toy": path, "toy-compile": path})
    assert (tmp_path / "asked").read_text() == "x\nx\n"  # its packages, and its framework


# --- words for records ---


def test_versions_that_decide_are_those_of_frameworks() -> None:
    names = ["torch", "torchvision", "jaxlib", "numpy", "numpy-stl", "triton", "nvidia-cudnn-cu12", "requests", "pip"]
    assert [name for name in names if FRAMEWORKS.match(name)] == [
        "torch", "torchvision", "jaxlib", "numpy", "triton", "nvidia-cudnn-cu12",
    ]  # fmt: skip


def test_the_fingerprint_is_that_of_path_version_and_packages() -> None:
    one = Interpreter("/p", "current", "3.11.7", {"a": "1", "b": "2"})
    assert one.fingerprint() == Interpreter("/p", "--python", "3.11.7", {"b": "2", "a": "1"}, {"x": 1}).fingerprint()
    others = [
        Interpreter("/q", "current", "3.11.7", {"a": "1", "b": "2"}),
        Interpreter("/p", "current", "3.11.8", {"a": "1", "b": "2"}),
        Interpreter("/p", "current", "3.11.7", {"a": "1", "b": "3"}),
        Interpreter("/p", "current", "3.11.7", {"a": "1"}),
    ]
    assert len({each.fingerprint() for each in [one, *others]}) == 5


def test_the_machine_keeps_its_name() -> None:
    assert environments.machine_id() == environments.machine_id()
