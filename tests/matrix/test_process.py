"""An attempt's processes end with it, however it ends, and what they print is kept within bounds."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from matrix.launch import commands, process
from matrix.launch.process import Observation, Order

LIMIT_S = 60.0  # for a condition that holds within a second on an idle machine
ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {LIMIT_S:.0f} s for: {what}"
        time.sleep(0.02)
    return found


@dataclass
class Attempt:
    """A folder, and a mark by which every process of the attempt is known."""

    folder: Path
    mark: str = field(default_factory=lambda: f"mark-{uuid.uuid4().hex}")

    def order(self, script: str, **more: Any) -> Order:
        path = self.folder / "script.py"
        path.write_text(textwrap.dedent(script))
        values: dict[str, Any] = {
            "command": [sys.executable, str(path)],
            "environment": dict(os.environ) | {"MARK": self.mark, "PYTHONUNBUFFERED": "1"},
            "cwd": self.folder,
            "folder": self.folder,
            "ranks": 1,
            "timeout_s": LIMIT_S,
            "no_progress_s": LIMIT_S,
        }
        return Order(**values | more)

    def run(self, script: str, **more: Any) -> Observation:
        return process.run(self.order(script, **more), lambda seen: False)

    def alive(self) -> list[str]:
        """Everything that lives with the mark, the tool's own supervisors of it included."""
        found = []
        for each in psutil.process_iter():
            try:
                marked = each.environ().get("MARK") == self.mark or any(self.mark in word for word in each.cmdline())
                if marked and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{each.pid} {each.status()} {each.cmdline()}")
            except psutil.Error:
                continue
        return found

    def log(self, name: str = "launcher") -> str:
        return (self.folder / f"{name}.log").read_text("utf-8", "replace")

    def pipes(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if stat.S_ISFIFO(path.lstat().st_mode)]


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    made = Attempt(tmp_path)
    yield made
    for each in psutil.process_iter():  # what a failed test leaves
        try:
            if each.environ().get("MARK") == made.mark:
                each.kill()
        except psutil.Error:
            continue


# A tree of every kind of process that has been seen to outlive a training script.
TREE = """
    import os, signal, subprocess, sys, time
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    stubborn = [sys.executable, "-c",
        "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; print('deaf'); time.sleep(600)"]
    subprocess.Popen(sleeper)                                          # a child
    subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"])            # a grandchild
    subprocess.Popen(sleeper, start_new_session=True)                  # in a session of its own
    deaf = subprocess.Popen(stubborn, stdout=subprocess.PIPE)          # deaf to polite signals
    deaf.stdout.readline()
    stopped = subprocess.Popen(sleeper)
    os.kill(stopped.pid, signal.SIGSTOP)                               # stopped
    if os.fork() == 0:                                                 # daemonised: two forks, a session, no files
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 256)
            while True: time.sleep(600)
        os._exit(0)
    os.wait()
    if os.fork() == 0:                                                 # an orphan that goes on to have children
        if os.fork() == 0:
            for _ in range(3): subprocess.Popen(sleeper)
            time.sleep(600)
        os._exit(0)
    open("ready", "w").close()
"""


def test_a_script_that_ends_leaves_no_process_behind(attempt: Attempt) -> None:
    seen = attempt.run(TREE)
    assert (seen.code, seen.ended_by, seen.trouble) == (0, None, None)
    assert attempt.alive() == []
    assert attempt.pipes() == []


@pytest.mark.parametrize("how", ["exit", "exception", "killed", "stopped"])
def test_a_script_that_fails_leaves_no_process_behind(attempt: Attempt, how: str) -> None:
    last = {
        "exit": "os._exit(3)",
        "exception": "1/0",
        "killed": "os.kill(os.getpid(), 9)",
        "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    }[how]
    timeout = {"timeout_s": 3.0} if how == "stopped" else {}
    seen = attempt.run(textwrap.dedent(TREE) + last, **timeout)
    assert (seen.code, seen.ended_by) == {
        "exit": (3, None),
        "exception": (1, None),
        "killed": (-9, None),
        "stopped": (None, "timeout"),
    }[how]
    assert attempt.alive() == []


@pytest.mark.parametrize("why", ["timeout", "hang", "untrue"])
def test_an_attempt_that_is_ended_leaves_no_process_behind(attempt: Attempt, why: str) -> None:
    tell = """
    import json, os
    with open("rank-0.events", "a") as file:
        file.write(json.dumps({"event": "start", "pid": os.getpid()}) + "\\n")
    """
    tells = textwrap.dedent(tell)
    order = attempt.order(
        tells + textwrap.dedent(TREE) + tells + "time.sleep(600)",
        timeout_s=8.0 if why == "timeout" else LIMIT_S,
        no_progress_s=8.0 if why == "hang" else LIMIT_S,
    )
    seen = process.run(order, lambda so_far: why == "untrue" and (attempt.folder / "ready").exists())
    assert (seen.code, seen.ended_by, seen.trouble) == (None, why, None)
    assert attempt.alive() == []
    assert attempt.pipes() == []
    if why != "untrue":
        assert "script.py" in seen.stacks["0"]


RUNNER = """
    import sys
    sys.path.insert(0, {root!r})
    from tests.matrix.test_process import Attempt
    from pathlib import Path
    attempt = Attempt(Path({folder!r}), {mark!r})
    attempt.run(Path({script!r}).read_text())
"""


def run_elsewhere(attempt: Attempt, script: str) -> subprocess.Popen[bytes]:
    """Run an attempt in a controller of its own; returns once all of its tree is there."""
    text = attempt.folder / "text"
    text.write_text(textwrap.dedent(script) + "\ntime.sleep(600)")
    values = {"root": str(ROOT), "folder": str(attempt.folder), "mark": attempt.mark, "script": str(text)}
    controller = subprocess.Popen([sys.executable, "-c", textwrap.dedent(RUNNER).format(**values)])
    until((attempt.folder / "ready").exists, "the tree of processes")
    return controller


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda n: n.name)
def test_a_controller_that_is_killed_leaves_no_process_behind(attempt: Attempt, number: signal.Signals) -> None:
    controller = run_elsewhere(attempt, TREE)
    below = [each.pid for each in psutil.Process(controller.pid).children(recursive=True)]
    assert len(below) > 8
    controller.send_signal(number)
    assert controller.wait(LIMIT_S) != 0
    until(lambda: not attempt.alive(), "the tree to be gone")
    until(lambda: not any(map(psutil.pid_exists, below)), "the supervisor to be gone")
    assert attempt.pipes() == []


@pytest.mark.parametrize("which", ["guard", "supervisor"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_a_supervisor_that_is_killed_leaves_no_process_behind(
    attempt: Attempt, which: str, number: signal.Signals
) -> None:
    controller = run_elsewhere(attempt, TREE)
    guard = psutil.Process(controller.pid).children()[0]
    victim = guard if which == "guard" else guard.children()[0]
    victim.send_signal(number)
    until(lambda: not attempt.alive(), "the tree to be gone")
    assert controller.wait(LIMIT_S) == 0
    assert attempt.pipes() == []


def test_that_a_supervisor_was_killed_is_told(attempt: Attempt) -> None:
    def kill(seen: Observation) -> bool:
        # The guard is the child of this process that has a child; other tests may have left others.
        guards = [each for each in psutil.Process().children() if "supervisor.py" in " ".join(each.cmdline())]
        next(below for guard in guards for below in guard.children()).kill()
        return False

    script = """
        import time
        open("rank-0.events", "w").write('{"event": "start", "pid": 1}\\n')
        time.sleep(600)
    """
    seen = process.run(attempt.order(script), kill)
    assert seen.trouble == "the attempt's supervisor ended before it reported"
    assert seen.code is None
    assert attempt.alive() == []


def test_processes_are_found_also_where_the_kernel_does_not_list_children(tmp_path: Path) -> None:
    text = (Path(process.__file__).with_name("supervisor.py")).read_text()
    supervisor = tmp_path / "supervisor.py"
    supervisor.write_text(text.replace("/children", "/no-such-file"))
    code = f"""
        import importlib.util, subprocess, time
        spec = importlib.util.spec_from_file_location("supervisor", {str(supervisor)!r})
        module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
        module.prctl(module.PR_SET_CHILD_SUBREAPER, 1)
        shell = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600 & wait"])
        while len(module.children()) < 3: time.sleep(0.01)
        print(module.kill_all(0), module.children())
    """
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert said.stdout == "3 []\n", said.stderr


def test_ranks_of_torchrun_do_not_outlive_it(attempt: Attempt) -> None:
    pytest.importorskip("torch")
    script = """
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        open(f"ready-{os.environ['RANK']}", "w").close()
        time.sleep(600)
    """
    order = attempt.order(script, ranks=2)
    command = commands.command("torchrun", sys.executable, [str(attempt.folder / "script.py")], 2)
    order = Order(**{**order.__dict__, "command": command, "timeout_s": LIMIT_S, "no_progress_s": LIMIT_S})
    (attempt.folder / "rank-0.events").write_text("")

    def ready(seen: Observation) -> bool:
        return all((attempt.folder / f"ready-{rank}").exists() for rank in (0, 1))

    import threading

    def report() -> None:
        until(lambda: ready(Observation()), "two ranks")
        with (attempt.folder / "rank-0.events").open("a") as file:
            file.write('{"event": "start", "pid": 1}\n')

    reporter = threading.Thread(target=report)
    reporter.start()
    seen = process.run(order, ready)
    reporter.join()
    assert seen.ended_by == "untrue"
    assert attempt.alive() == []


# --- output ---


def test_output_keeps_its_head_and_its_tail(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "KEEP_BYTES", 1000)
    seen = attempt.run("for i in range(10_000): print(f'line {i:04}')")
    text = attempt.log()
    assert seen.code == 0
    assert text.startswith("line 0000\nline 0001\n")
    assert text.endswith("line 9998\nline 9999\n")
    assert text[500:].startswith("\n[... 99000 bytes left out ...]\n")  # 10,000 lines of 10 bytes, 500 + 500 kept
    assert len(text) == 1000 + len("\n[... 99000 bytes left out ...]\n")


def test_output_of_the_kept_size_is_whole(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "KEEP_BYTES", 1000)
    attempt.run("print('x' * 998, end='\\n'); print()")
    assert attempt.log() == "x" * 998 + "\n\n"


def test_a_flood_of_output_ends_with_its_timeout_and_fills_nothing(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "KEEP_BYTES", 1 << 20)
    flood = """
        import os, subprocess
        subprocess.Popen(["sh", "-c", "while :; do echo child; done"])
        while True: os.write(1, b"x" * 65536)
    """
    seen = attempt.run(flood, timeout_s=2.0)
    assert (seen.ended_by, seen.trouble) == ("timeout", None)
    assert attempt.alive() == []
    assert (attempt.folder / "launcher.log").stat().st_size < (1 << 20) + 100


def test_a_child_that_floods_does_not_keep_an_ended_attempt(attempt: Attempt) -> None:
    seen = attempt.run("import subprocess; subprocess.Popen(['sh', '-c', 'while :; do echo child; done'])")
    assert (seen.code, seen.ended_by, seen.trouble) == (0, None, None)
    assert attempt.alive() == []


def test_half_a_character_and_bytes_that_are_no_text_are_kept_as_they_are(attempt: Attempt) -> None:
    attempt.run("import os; os.write(1, b'\\xff\\x00\\xe6\\xbc'); os.write(2, b'\\xa2\\n\\xc3')")
    assert (attempt.folder / "launcher.log").read_bytes() == b"\xff\x00\xe6\xbc\xa2\n\xc3"


def test_live_output_is_shown_while_it_is_written(attempt: Attempt, capfd: pytest.CaptureFixture[str]) -> None:
    attempt.run("print('to be seen')", echo=True)
    assert capfd.readouterr().err == "to be seen\n"


def test_a_folder_that_is_gone_is_the_tools_error(attempt: Attempt) -> None:
    order = attempt.order("print(1)")
    seen = process.run(Order(**{**order.__dict__, "folder": attempt.folder / "gone"}), lambda seen: False)
    assert seen.trouble is not None
    assert "No such file or directory" in seen.trouble


def test_a_command_that_cannot_be_started_says_why(attempt: Attempt) -> None:
    seen = attempt.run("", command=["/no/such/python", "x"])
    assert seen.code == 127
    assert attempt.log() == "cannot start /no/such/python: [Errno 2] No such file or directory: '/no/such/python'\n"


def test_a_disk_that_is_full_is_the_tools_error_and_ends_the_attempt_no_earlier(attempt: Attempt) -> None:
    (attempt.folder / "launcher.log").symlink_to("/dev/full")
    seen = attempt.run("print('x' * 100); open('done', 'w').close()")
    assert seen.code == 0
    assert (attempt.folder / "done").exists()
    assert seen.trouble == "launcher.log cannot be written: No space left on device"


def test_events_that_are_damaged_are_the_tools_error(attempt: Attempt) -> None:
    seen = attempt.run("open('rank-0.events', 'w').write('{\"event\": \"sta\\n{}\\n')")
    assert seen.trouble == "rank-0.events is damaged: what happened in the attempt is not known"


def test_progress_lines_without_end_are_not_read_without_end(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_EVENTS", 1 << 20)
    line = '{"event": "progress", "step": 1}\\n'
    seen = attempt.run(f"open('rank-0.events', 'w').write('{line}' * 100_000)")
    assert seen.trouble == "rank-0.events: the script prints more than 1 MiB of progress lines"


def test_the_command_gets_the_default_signals_and_an_empty_input(attempt: Attempt) -> None:
    attempt.run(
        """
        import os, signal, sys
        print(repr(sys.stdin.read()), os.getsid(0) == os.getpid(), sorted(map(int, os.listdir("/proc/self/fd"))))
        print(signal.getsignal(signal.SIGINT).__name__, signal.getsignal(signal.SIGTERM).name)
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        """
    )
    assert attempt.log() == "'' True [0, 1, 2, 3]\ndefault_int_handler SIG_DFL\nset()\n"


def test_a_large_environment_reaches_the_command(attempt: Attempt) -> None:
    order = attempt.order(
        "import os; print(len(os.environ['LARGE']), os.environ['ODD'].encode('utf-8', 'surrogateescape'))"
    )
    order.environment.update(LARGE="x" * 100_000, ODD="\udcff")
    seen = process.run(order, lambda seen: False)
    assert (seen.code, attempt.log()) == (0, "100000 b'\\xff'\n")


def test_memory_of_the_command_is_told(attempt: Attempt) -> None:
    seen = attempt.run("x = bytearray(200 << 20)")
    assert seen.peak_memory_bytes is not None
    assert 200 << 20 < seen.peak_memory_bytes < 400 << 20
