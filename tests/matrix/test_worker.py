"""A script under the worker does what it does by hand: each little script runs both ways and says the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from matrix.attempt import WORKER

LIMIT_S = 120.0

OBSERVER = """
class Observer:
    def graphs(self): return 0
    def seen(self): return {"framework": "none"}
    def remove(self): pass
    def final(self): return {"graphs": 0, "device_peak_bytes": None}

def observe(after_import):
    return Observer()
"""


def other_pythons() -> list[str]:
    """Interpreters of other versions that this machine has; a cell may run in any from 3.10 on."""
    found = []
    for version in ("3.10", "3.12", "3.13"):
        paths = [shutil.which(f"python{version}")]
        paths += [str(each) for each in Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
        for path in filter(None, paths):
            said = subprocess.run([path, "-c", "import sys; print(sys.version)"], capture_output=True, text=True)
            if said.stdout.startswith(version):
                found.append(path)
                break
    return found


PYTHONS = [sys.executable, *other_pythons()]
NEWEST = PYTHONS[-1]


@dataclass
class Ran:
    """What a process left: exit code, both streams, and the events of the worker."""

    code: int
    out: bytes
    err: bytes
    events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


@dataclass
class Place:
    """A folder with a script, and two ways to run it."""

    folder: Path
    settings: Path
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    script: str = "train.py"
    arguments: tuple[str, ...] = ("--steps", "3")

    def write(self, script: str, files: Mapping[str, str] = {}) -> None:
        for name, text in {self.script: script, **files}.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text), "utf-8")

    def _run(self, command: list[str]) -> Ran:
        own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "PYENV"))}
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env=own | {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"} | self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
        )
        return Ran(ended.returncode, ended.stdout, ended.stderr)

    def by_hand(self) -> Ran:
        return self._run([self.python, self.script, *self.arguments])

    def watched(self, **settings: Any) -> Ran:
        observer = self.settings / "observer.py"
        observer.write_text(OBSERVER)
        written = {
            "script": self.script,
            "arguments": list(self.arguments),
            "folder": str(self.settings),
            "observer": str(observer),
            "progress": None,
            "ranked": False,
            "faults": True,
            **settings,
        }
        file = self.settings / "settings.json"
        file.write_text(json.dumps(written))
        events = self.settings / "rank-0.events"
        events.unlink(missing_ok=True)
        ran = self._run([self.python, str(WORKER), str(file)])
        ran.events = [json.loads(line) for line in events.read_bytes().splitlines()] if events.exists() else []
        return ran


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "workload").mkdir()
    (tmp_path / "attempt").mkdir()
    return Place(tmp_path / "workload", tmp_path / "attempt")


OWN_FRAMES = re.compile(r' *File "[^"]*/inside/worker\.py".*\n(?:    .*\n)*')
VARYING = re.compile(r"0x[0-9a-f]+|repeated \d+ more")  # addresses; how deep recursion went before it was stopped


def plain(data: bytes) -> str:
    """Output without what differs from process to process, and without frames of the worker below the script's."""
    return VARYING.sub("", OWN_FRAMES.sub("", data.decode("utf-8", "backslashreplace")))


def same(place: Place) -> tuple[Ran, Ran]:
    """Run both ways; everything that can be seen from outside is equal."""
    hand, watched = place.by_hand(), place.watched()
    assert (plain(watched.out), plain(watched.err)) == (plain(hand.out), plain(hand.err))
    assert watched.code == hand.code
    assert watched.of("start")
    assert not watched.of("blind")
    return hand, watched


# --- what the script sees of its world ---

WORLD = """
    import sys, os, builtins
    names = sorted(vars())
    modules = sorted(name for name in sys.modules if name != "builtins")
    streams = [
        [s.name, s.mode, s.encoding, s.errors, s.isatty(), s.fileno(), s.closed, s.write_through, s.newlines,
         s.readable(), s.writable(), s.seekable(), getattr(s.buffer, "raw", s.buffer).name, s.buffer.mode
         if hasattr(s.buffer, "mode") else None]
        for s in (sys.stdout, sys.stderr)
    ]
    import __main__, inspect, json
    class Here: pass
    print(json.dumps({
        "names": [n for n in names if n not in ("names",)],
        "modules": modules,
        "streams": streams,
        "own": [sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, sys.stdin.read()],
        "path": sys.path, "argv": sys.argv, "orig_argv": sys.orig_argv, "cwd": os.getcwd(),
        "name": __name__, "file": __file__, "spec": repr(__spec__), "package": repr(__package__), "doc": __doc__,
        "cached": repr(globals().get("__cached__")), "annotations": repr(globals().get("__annotations__")),
        "builtins": __builtins__ is builtins, "loader": type(__loader__).__name__, "loads": __loader__.name,
        "loader_path": __loader__.path, "loader_source": __loader__.get_source("__main__")[:20],
        "main": __main__.__dict__ is globals(), "main_repr": repr(__main__),
        "class": Here.__module__, "source": inspect.getsource(Here).strip(),
        "code": inspect.currentframe().f_code.co_filename,
        "back": repr(inspect.stack()[0].filename), "meta_path": [type(f).__name__ for f in sys.meta_path],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace()],
        "flags": repr(sys.flags), "warn": sys.warnoptions, "limit": sys.getrecursionlimit(),
        "fd": os.open("/dev/null", os.O_RDONLY), "env": sorted(os.environ),
    }, indent=1, sort_keys=True))
"""


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).name)
@pytest.mark.parametrize("variables", [{}, {"PYTHONSAFEPATH": "1"}, {"PYTHONUNBUFFERED": "1"}], ids=str)
def test_a_script_sees_the_world_that_it_has_by_hand(place: Place, python: str, variables: dict[str, str]) -> None:
    place.python, place.environment = python, variables
    place.write(WORLD)
    hand, watched = place.by_hand(), place.watched()
    expected, found = json.loads(hand.out), json.loads(watched.out)
    assert found.pop("fd") in (expected["fd"], expected["fd"] + 1)  # one descriptor more: where crashes are written
    expected.pop("fd")
    # One finder more, which waits for multiprocessing.spawn and then goes.
    assert found.pop("meta_path") == ["AfterImport", *expected.pop("meta_path")]
    assert found == expected


def test_a_script_that_is_a_link_finds_the_modules_beside_its_target(place: Place) -> None:
    place.write("import helper; print(helper.__file__)", {"elsewhere/real.py": "", "elsewhere/helper.py": ""})
    (place.folder / "elsewhere" / "real.py").write_text(
        "import helper, sys; print(helper.__file__, sys.path[0], __file__)"
    )
    (place.folder / "train.py").unlink()
    (place.folder / "train.py").symlink_to("elsewhere/real.py")
    same(place)


def test_a_script_in_a_folder_below_has_that_folder_first_and_the_workload_as_working_directory(place: Place) -> None:
    place.script = "torch/train.py"
    place.write("import os, sys; print(sys.path[0], os.getcwd(), __file__, sys.argv)")
    same(place)


SHADOWS = (
    "json", "re", "traceback", "resource", "linecache", "opcode", "worker", "matrix",
    "journal", "plan", "importlib_metadata", "socket", "textwrap", "observer",
)  # fmt: skip


@pytest.mark.parametrize("python", [sys.executable, NEWEST], ids=["this", "newest"])
@pytest.mark.parametrize("on", ["script's folder", "PYTHONPATH"])
def test_modules_of_the_user_named_like_the_librarys_or_ours_are_the_users(place: Place, on: str, python: str) -> None:
    place.python = python
    where = "beside" if on == "PYTHONPATH" else "."
    place.environment = {"PYTHONPATH": str(place.folder / "beside")} if on == "PYTHONPATH" else {}
    imports = "\n".join(f"import {name}; print({name}.OWN)" for name in SHADOWS)
    ends = "\nprint('step=1 loss=2.0')\nraise SystemExit(3)"
    place.write(imports + ends, {f"{where}/{name}.py": f"OWN = {name!r}" for name in SHADOWS})
    hand, watched = place.by_hand(), place.watched()
    assert (watched.code, watched.out, watched.err) == (hand.code, hand.out, hand.err)
    assert hand.code == 3
    assert [event["loss"] for event in watched.of("progress")] == [2.0]
    assert watched.of("end")


@pytest.mark.parametrize("name", ["matrix", "reports", "worker", "observe_torch", "probe_torch", "matrix.inside"])
def test_nothing_of_ours_can_be_imported(place: Place, name: str) -> None:
    place.write(
        f"""
        try:
            import {name}
        except ImportError as error:
            print(type(error).__name__)
        """
    )
    place.python = NEWEST if len(PYTHONS) > 1 else sys.executable  # this one has us installed
    same(place)


# --- little scripts, each run both ways ---

SCRIPTS: dict[str, str] = {
    "prints": "print('a'); print('b', end=''); print(flush=True); print('c', file=__import__('sys').stderr)",
    "writes": "import sys; sys.stdout.write('partial'); sys.stdout.flush(); sys.stdout.writelines(['x\\n', 'y'])",
    "bytes": "from sys import stdout as o; o.buffer.write(b'\\xff\\x00\\xc3'); o.flush(); o.buffer.write(b'\\n')",
    "carriage returns": "import sys\nfor i in range(5): print(f'\\r{i}/5 step={i} loss=1.5', end='', flush=True)",
    "windows line ends": "print('step=1 loss=2.5\\r'); print('step=2 loss=2.25\\r')",
    "half a character": "import sys; b = 'é'.encode(); o = sys.stdout.buffer; o.write(b[:1]); o.flush()",
    "unprintable": "print('\\ud800')",
    "unprintable on stderr": "import sys; print('\\ud800', file=sys.stderr)",
    "reconfigured": """
        import sys
        sys.stdout.reconfigure(encoding="latin-1", errors="replace", newline="\\r\\n", line_buffering=False)
        print("é 漢"); print(sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering)
    """,
    "rewrapped": """
        import io, sys
        sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", write_through=True)
        print("step=1 loss=2.0")
    """,
    "detached": "import sys; raw = sys.stdout.detach(); raw.write(b'step=1 loss=2.0\\n'); raw.flush()",
    "redirected": """
        import contextlib, io
        held = io.StringIO()
        with contextlib.redirect_stdout(held):
            print("step=1 loss=9")
        print("held", held.getvalue())
    """,
    "original stream": "import sys; sys.stdout = None; sys.__stdout__.write('still here\\n')",
    "closed stdout": "import sys; print('a'); sys.stdout.close()",
    "no stdout": "import sys; sys.stdout = None; sys.stderr = None",
    "replaced stdout": "import sys\nclass S:\n def write(self, t): return len(t)\nsys.stdout = S()\nprint('unseen')",
    "closed descriptors": "import os; print('a'); os.closerange(3, 256); print('step=1 loss=2.0'); open('/dev/null')",
    "print after close": "import sys; sys.stdout.close(); print('a')",
    "descriptor": "import os, sys; print('a'); sys.stdout.flush(); os.write(1, b'raw\\n'); print('b')",
    "child prints": "import subprocess, sys; print('a', flush=True); subprocess.run(['echo', 'child']); print('b')",
    "logging": """
        import logging, sys
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
        logging.info("to stderr"); logging.getLogger("x").warning("step=1 loss=2.0")
        logging.captureWarnings(True); import warnings; warnings.warn("captured")
    """,
    "warnings": "import warnings; warnings.warn('of the script'); warnings.warn('again', DeprecationWarning)",
    "future": "from __future__ import annotations\ndef f(x: Undefined): ...\nprint(f.__annotations__)",
    "no future": "def f(x: int): ...\nprint(f.__annotations__)",
    "docstring": "'''What it is.'''\nx: int = 1\nprint(__doc__, __annotations__)",
    "encoding cookie": "# -*- coding: latin-1 -*-\nprint(len('é'))",
    "pickle": """
        import dataclasses, enum, pickle, re, sys, typing
        @dataclasses.dataclass
        class Point:
            x: int
            y: "Point | None" = None
        class Colour(enum.Enum):
            RED = 1
        def function(): ...
        made = pickle.loads(pickle.dumps([Point(1, Point(2)), Colour.RED, function, re.compile("a+"), Point]))
        print(made[0], made[1] is Colour.RED, made[2] is function, made[3], made[4] is Point)
        class Hinted:
            x: "Point"
        print(typing.get_type_hints(Hinted), Point.__module__)
    """,
    "copy of a module": """
        import importlib, types, collections, copy
        print(copy.deepcopy(collections.OrderedDict(a=1)), isinstance({}, collections.abc.Mapping))
        print(importlib.import_module("json").dumps({"a": collections.Counter("aab")}))
    """,
    "reload": "import importlib, __main__\ntry: importlib.reload(__main__)\nexcept Exception as e: print(type(e), e)",
    "runpy": "import runpy; print(runpy.run_path('helper.py')['X'])",
    "exit handlers": """
        import atexit, sys
        atexit.register(print, "first"); atexit.register(print, "second"); print("body")
    """,
    "exit handler raises": "import atexit\ndef f(): raise ValueError('late')\natexit.register(f)",
    "exit handler exits": "import atexit, os; atexit.register(lambda: os._exit(9)); print('x', flush=True)",
    "thread": """
        import threading, time
        def work():
            time.sleep(0.1); print("step=1 loss=2.0"); print("step=2 loss=1.0")
        threading.Thread(target=work).start(); print("main is done")
    """,
    "thread raises": """
        import threading
        def work(): raise ValueError("in a thread")
        t = threading.Thread(target=work, name="mine"); t.start(); t.join(); print("on")
    """,
    "thread exits": "import threading, sys; threading.Thread(target=lambda: sys.exit(4)).start()",
    "pool": """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(2); print(list(pool.map(abs, [-1, 2])))
    """,
    "daemon thread": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "fork": """
        import os, sys
        print("before", flush=True)
        pid = os.fork()
        if pid == 0:
            print("step=7 loss=7.0"); raise ValueError("of the child")
        os.waitpid(pid, 0); print("step=1 loss=2.0")
    """,
    "processes by fork": """
        import multiprocessing
        def f(x): return x * 2
        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(f, [1, 2]))
    """,
    "processes by spawn": """
        import multiprocessing, sys
        def f(x): return x * 2, __name__, sys.path[0], sys.argv
        print(__name__, flush=True)
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(f, [1, 2]))
    """,
    "processes by forkserver": """
        import multiprocessing
        def f(x): return x * 2, __name__
        if __name__ == "__main__":
            context = multiprocessing.get_context("forkserver"); context.set_forkserver_preload(["__main__"])
            with context.Pool(1) as pool: print(pool.map(f, [1, 2]))
    """,
    "process pool": """
        from concurrent.futures import ProcessPoolExecutor
        class Item:
            def __init__(self, x): self.x = x
        def f(item): return Item(item.x + 1)
        if __name__ == "__main__":
            with ProcessPoolExecutor(1) as pool: print([each.x for each in pool.map(f, [Item(1)])])
    """,
    "argument parser": """
        import argparse
        parser = argparse.ArgumentParser(); parser.add_argument("--steps", type=int)
        print(parser.parse_args(), parser.prog)
    """,
    "wrong argument": "import argparse; argparse.ArgumentParser().parse_args()",
    "no argv": "import sys; del sys.argv; print('on')",
    "other directory": "import os; os.chdir('/'); print('step=1 loss=2.0', os.getcwd())",
    "reads stdin": "import sys; print(repr(sys.stdin.read()))\ntry: input()\nexcept EOFError: print('end')",
    "signal of its own": """
        import os, signal
        signal.signal(signal.SIGTERM, lambda *a: print("got", a[0])); os.kill(os.getpid(), signal.SIGTERM)
        print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGPIPE), signal.getsignal(signal.SIGHUP))
        signal.signal(signal.SIGALRM, lambda *a: print("alarm"))
        signal.setitimer(signal.ITIMER_REAL, 0.05); signal.pause()
    """,
    "faults": "import faulthandler, sys; faulthandler.enable(); faulthandler.dump_traceback(all_threads=False)",
    "trace": "import sys, threading\nprint(sys.gettrace(), sys.getprofile())",
    "recursion": "def f(n): return f(n + 1)\ntry: f(0)\nexcept RecursionError as e: print('deep')",
    "garbage": "import gc, sys; print(gc.isenabled(), gc.get_threshold(), sys.getswitchinterval())",
    "generator left open": "def g():\n try: yield\n finally: print('closed')\nx = g(); next(x)",
    "object left over": "class X:\n def __del__(self): print('deleted')\nx = X()",
    "builtins used by site": "print(type(exit).__name__, type(copyright).__name__); exit(5)",
    "binary junk": "import os, sys; sys.stdout.buffer.write(bytes(range(256)) * 400)",
}
ENDS: dict[str, str] = {
    "exit 0": "raise SystemExit(0)",
    "exit none": "import sys; sys.exit()",
    "exit 7": "import sys; sys.exit(7)",
    "exit 256": "import sys; sys.exit(256)",
    "exit -1": "import sys; sys.exit(-1)",
    "exit true": "import sys; sys.exit(True)",
    "exit text": "import sys; sys.exit('a reason')",
    "exit object": "import sys; sys.exit(['a', 1])",
    "os exit": "import os; print('x', flush=True); os._exit(3)",
    "quit": "quit(2)",
    "error": "def f():\n    1/0\nf()",
    "error chain": "try:\n    1/0\nexcept ZeroDivisionError:\n    raise ValueError('second')",
    "error from": "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('second') from e",
    "error with note": "e = ValueError('x')\ngetattr(e, 'add_note', print)('noted')\nraise e",
    "group": "raise __builtins__.__dict__.get('ExceptionGroup', lambda m, e: e[0])('g', [ValueError(1), KeyError(2)])",
    "error without words": "class E(Exception):\n def __str__(self): raise RuntimeError\nraise E",
    "error of surrogates": "raise ValueError('\\udcff\\ud800')",
    "base exception": "class E(BaseException): ...\nraise E('x')",
    "interrupt": "raise KeyboardInterrupt",
    "generator exit": "raise GeneratorExit",
    "stop": "raise StopIteration(3)",
    "syntax": "def f(:\n    pass",
    "indentation": "if True:\nprint(1)",
    "syntax of a module": "import broken",
    "missing module": "import not_a_module_at_all",
    "assertion": "assert 1 == 2, 'no'",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "broken pipe": "import os, signal as s; s.signal(s.SIGPIPE, s.SIG_DFL); os.kill(os.getpid(), s.SIGPIPE)",
    "hook": "import sys\nsys.excepthook = lambda kind, error, t: print(kind, error, t.tb_lineno, t.tb_next)\n1/0",
    "hook raises": "import sys\ndef hook(*a): raise KeyError('in the hook')\nsys.excepthook = hook\n1/0",
    "hook exits": "import sys\nsys.excepthook = lambda *a: sys.exit(6)\n1/0",
    "hook of traceback": "import sys, traceback\nsys.excepthook = lambda *a: traceback.print_exception(*a)\n1/0",
    "last error": "import atexit, sys\natexit.register(lambda: print(sys.last_type, sys.last_value))\n1/0",
    "error and handlers": "import atexit; atexit.register(print, 'handler'); 1/0",
    "error and threads": "import threading, time\nthreading.Timer(0.2, print, ['thread']).start()\n1/0",
    "recursion": "def f(): f()\nf()",
    "warnings are errors": "import warnings; warnings.simplefilter('error'); warnings.warn('x')",
    "exit in finally": "import sys\ntry: 1/0\nfinally: sys.exit(8)",
    "unraisable": "class X:\n def __del__(self): raise ValueError('in del')\ndel (x := [X()])[:]\nprint('on')",
}  # fmt: skip
HELPERS = {"helper.py": "X = __name__", "broken.py": "def f(:"}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=list(SCRIPTS))
def test_a_script_does_what_it_does_by_hand(place: Place, script: str) -> None:
    place.write(script, HELPERS)
    same(place)


@pytest.mark.parametrize("script", ENDS.values(), ids=list(ENDS))
def test_a_script_ends_as_it_ends_by_hand(place: Place, script: str) -> None:
    place.write(script, HELPERS)
    same(place)


# --- what the worker tells ---


def test_progress_is_told_as_it_was_printed(place: Place) -> None:
    place.write(
        """
        import sys, time
        print("step=1 loss=2.5 tokens=640")
        print("\\x1b[32mINFO\\x1b[0m step: 2, loss: 1e-3, tokens: 1280", file=sys.stderr)
        sys.stdout.write("step=3 "); sys.stdout.flush(); sys.stdout.write("loss=nan examples=7\\n")
        print("loss=4"); print("step=5"); print("eval=0.25"); print("x" * 100_000 + " step=6 loss=6")
        for i in (7, 8): print(f"\\r{i} step={i} loss={i}", end="")
        print()
        """
    )
    _, watched = same(place)
    told = [(event["step"], repr(event["loss"]), event["units"]) for event in watched.of("progress")]
    assert told == [(1, "2.5", 640), (2, "0.001", 1280), (3, "nan", 7), (7, "7.0", None), (8, "8.0", None)]
    assert [event["value"] for event in watched.of("eval")] == [0.25]
    assert all(watched.of("start")[0]["time"] <= event["written"] for event in watched.of("progress"))


def test_lines_of_a_thread_that_outlives_main_are_told_before_the_end(place: Place) -> None:
    place.write(SCRIPTS["thread"])
    watched = place.watched()
    assert [event["event"] for event in watched.events] == ["start", "progress", "progress", "seen", "end"]


def test_a_fork_of_the_script_tells_nothing(place: Place) -> None:
    place.write(SCRIPTS["fork"])
    watched = place.watched()
    assert [event["step"] for event in watched.of("progress")] == [1]
    assert not watched.of("exception")
    assert len(watched.of("end")) == 1


@pytest.mark.parametrize(
    ("script", "told"),
    [("exit 0", [0]), ("exit none", [0]), ("exit 7", [7]), ("exit true", [1]), ("exit text", [1]), ("error", [])],
)
def test_the_exit_code_is_told(place: Place, script: str, told: list[int]) -> None:
    place.write(ENDS[script])
    watched = place.watched()
    assert json.dumps([event["code"] for event in watched.of("exit")]) == json.dumps(told)  # 1 is not true
    assert len(watched.of("end")) == 1


def test_an_exception_is_told_with_the_users_frames_only(place: Place) -> None:
    place.write(ENDS["error"])
    told = place.watched().of("exception")[0]
    assert [Path(frame["file"]).name for frame in told["chain"][0]["frames"]] == ["train.py", "train.py"]
    assert told["chain"][0]["type"] == "ZeroDivisionError"
    assert "worker.py" not in told["traceback"]


def test_words_that_are_no_unicode_are_told_all_the_same(place: Place) -> None:
    place.write(ENDS["error of surrogates"])
    told = place.watched().of("exception")[0]
    assert told["chain"][0]["message"] == "??"


@pytest.mark.parametrize("broken", ["graphs", "seen", "remove", "final"])
def test_an_observer_that_breaks_is_told_and_harms_nothing(place: Place, broken: str) -> None:
    place.write("print('step=1 loss=2.0'); print('step=2 loss=1.0'); print('done')")
    hand = place.by_hand()
    observer = place.settings / "observer.py"
    text = OBSERVER.replace(
        f"def {broken}(self):", f"def {broken}(self): raise ValueError('unknown version')\n    def x(self):"
    )
    (place.settings / "breaking.py").write_text(text)
    assert observer != place.settings / "breaking.py"
    watched = place.watched(observer=str(place.settings / "breaking.py"))
    assert (watched.code, watched.out) == (hand.code, hand.out)
    assert {event["reason"] for event in watched.of("blind")} == {"ValueError: unknown version"}
    assert watched.of("end")


def test_an_observer_that_breaks_at_an_import_does_not_break_the_import(place: Place) -> None:
    text = (
        OBSERVER
        + """
def fail(module): raise ValueError("unknown version")
def observe(after_import):
    after_import("wave", fail)
    return Observer()
"""
    )
    (place.settings / "breaking.py").write_text(text)
    place.write("import wave; print(wave.__spec__.loader, wave.__loader__, wave.open)")
    hand, watched = place.by_hand(), place.watched(observer=str(place.settings / "breaking.py"))
    assert (watched.code, plain(watched.out)) == (hand.code, plain(hand.out))
    assert [event["reason"] for event in watched.of("blind")] == ["ValueError: unknown version"]
    assert not watched.of("seen")


def test_a_crash_is_reported_where_the_controller_finds_it(place: Place) -> None:
    place.write("import ctypes\ndef deep(): ctypes.string_at(0)\ndeep()")
    hand, watched = place.by_hand(), place.watched()
    assert watched.code == hand.code == -11
    assert "in deep" in (place.settings / "rank-0.crash").read_text()


def test_output_of_many_lines_and_one_endless_line_costs_little_memory(place: Place) -> None:
    place.write(
        """
        import resource, sys
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for i in range(200_000): print("some words of a log that say nothing of progress", i)
        for i in range(400): sys.stdout.write("x" * 65_536)
        print("\\nstep=1 loss=2.0")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print("grown", grown < 8192, file=sys.stderr)
        """
    )
    hand, watched = place.by_hand(), place.watched()
    assert watched.out == hand.out
    assert watched.err == hand.err == b"grown True\n"
    assert len(watched.of("progress")) == 1


def test_peak_memory_is_the_scripts_own_and_not_its_launchers(place: Place) -> None:
    place.write("import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)")
    place.watched()  # writes its settings
    (place.settings / "rank-0.events").unlink()
    large = "import os, sys; held = bytearray(300 << 20); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    ran = place._run([place.python, "-c", large, str(WORKER), str(place.settings / "settings.json")])
    (end,) = map(json.loads, (place.settings / "rank-0.events").read_bytes().splitlines()[-1:])
    assert int(ran.out) > 300
    assert 4 << 20 < end["peak_memory_bytes"] < 200 << 20
