"""Run a user's script as `python SCRIPT ARGS...` would, and say from inside what happens.

Run by path in the cell's own interpreter: `python worker.py SETTINGS.json`. Standard library only. What the script
sees is what it would see by hand: `sys.path[0]`, `sys.argv`, `__main__`, the working directory, the standard streams,
exceptions, exit codes; nothing of this package is importable.

What happens is written as JSON lines to `rank-N.events` in the attempt's folder:

    start      the process began: pid, host, interpreter and its version
    progress   a progress line was written: when, step, loss, units, graphs compiled so far
    eval       the closing evaluation was written
    seen       what the observer of the framework saw of devices and data (see `observe_torch.py`, `observe_jax.py`)
    exception  the script raised: what `describe` says of it
    exit       the script ended itself: its exit code, and for one other than 0 the same
    end        the script came to its end: peak memory, graphs
    blind      what the script does could not be observed, and why

Times are seconds of CLOCK_MONOTONIC, which all processes of one host share.

Private names used: `threading._shutdown`, `multiprocessing.spawn.get_preparation_data`.
"""

import os
import sys

NAMES = frozenset(globals()) - {"os", "sys"}  # what a fresh `__main__` has
AT_START = frozenset(sys.modules)  # what the interpreter itself had loaded
PATH = list(sys.path)
# A user's file on PYTHONPATH may be named like a module of the standard library; what runs here means the library's.
LIBRARY = [each for each in PATH if each.startswith(os.path.dirname(os.__file__)) or each.endswith("lib-dynload")]
LIBRARY = [each for each in LIBRARY if "-packages" not in each]
sys.path[:] = LIBRARY

import collections  # noqa: E402
import contextlib  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import linecache  # noqa: E402
import opcode  # noqa: E402
import re  # noqa: E402
import resource  # noqa: E402
import time  # noqa: E402
import tokenize  # noqa: E402, F401 - by others only when they need it
import traceback  # noqa: E402

sys.path[:] = PATH
OURS = {name: module for name, module in sys.modules.items() if name not in AT_START}

LOOKS = 2  # the observer looks until the second progress line, then it is removed: what is timed runs undisturbed
MAX_LINE = 65536  # a longer line is no progress line
MAX_TEXT = 200_000  # characters of a message or traceback that are kept, half from each end
MAX_CHAIN, MAX_FRAMES = 20, 200  # exceptions, and frames of each, that are told

ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)"
PAIR = re.compile(rf"(?<![\w.])(step|loss|tokens|examples|eval)\s*[=:]\s*({NUMBER})(?![\w.])", re.IGNORECASE)
TELLS = re.compile(rb"loss|eval", re.IGNORECASE)  # a line without them is not looked at further: output may be endless


class Events:
    """The file that tells the controller what happens; one write per event, so that lines never interleave.

    It is opened for each: the script has the file descriptors that it would have by hand, and may close all of them.
    """

    def __init__(self, path):
        self.path = path
        self.pid = os.getpid()

    def emit(self, event, **fields):
        if os.getpid() != self.pid:  # a fork of the script is not the script
            return
        record = {"event": event, "time": time.monotonic(), **fields}
        line = json.dumps(record, default=str, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with contextlib.suppress(OSError):  # a full disk, no descriptor left: the script must not fail for it
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(file, line)
            finally:
                os.close(file)


def shorten(text):
    """Bound a text, keeping its beginning and its end."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text) - MAX_TEXT} characters left out ...\n{text[-half:]}"


def read_pairs(line, pattern=None):
    """The numbers of one line of output: `{"step": 40.0, "loss": 2.3, "tokens": 5120.0}`, whatever of them is there.

    Args:
        line: bytes without the newline; ANSI codes, and what a carriage return overwrote, are taken out.
        pattern: a compiled regex with named groups, instead of `name=value` pairs.
    """
    text = ANSI.sub(b"", line).replace(b"\r\n", b"\n").rstrip(b"\r\n").rsplit(b"\r", 1)[-1].decode("utf-8", "replace")
    if pattern is not None:
        match = pattern.search(text)
        pairs = {} if match is None else {k: v for k, v in match.groupdict().items() if v is not None}
        if match is None:  # the closing line may be the usual one, whatever the others look like
            pairs = {name.lower(): value for name, value in PAIR.findall(text) if name.lower() == "eval"}
    else:
        pairs = {name.lower(): value for name, value in PAIR.findall(text)}
    numbers = {}
    for name, value in pairs.items():
        try:
            numbers[name] = float(value.replace(",", "").replace("_", ""))
        except ValueError:
            continue
    return numbers


class Watch:
    """Reads progress lines as they are written, tells them, and drives the observer."""

    def __init__(self, events, observer, pattern=None):
        self.events = events
        self.observer = observer
        self.pattern = pattern
        self.pid = os.getpid()
        self.lines = 0
        self.looked = False

    def line(self, line):
        """Look at a line that was written. Nothing that goes wrong here reaches the script's print."""
        if os.getpid() != self.pid or len(line) > MAX_LINE:  # a forked data loader writes through the same stream
            return
        if self.pattern is None and not TELLS.search(line):
            return
        try:
            self.read(line)
        except Exception as error:
            self.blind(error)

    def read(self, line):
        now = time.monotonic()
        numbers = read_pairs(line, self.pattern)
        if "step" in numbers and "loss" in numbers:
            self.lines += 1
            units = numbers.get("tokens", numbers.get("examples", numbers.get("units")))
            self.events.emit(
                "progress",
                written=now,
                step=numbers["step"],
                loss=numbers["loss"],
                units=units,
                graphs=self.observer.graphs(),
            )
            if self.lines == LOOKS:
                self.look()
        if "eval" in numbers:
            self.events.emit("eval", value=numbers["eval"])

    def look(self):
        """Say what the observer saw, then take it out of the framework."""
        if self.looked:
            return
        self.looked = True
        try:
            if AfterImport.broken is not None:
                raise AfterImport.broken
            self.events.emit("seen", **self.observer.seen())
        except Exception as error:  # a version of the framework that the observer does not know
            self.blind(error)
        try:
            self.observer.remove()
        except Exception as error:
            self.blind(error)

    def blind(self, error):
        self.events.emit("blind", reason=f"{type(error).__name__}: {error}")


class WatchedFile(io.FileIO):
    """A standard stream's file that shows every written line to the watch."""

    def __init__(self, number, name, watch):
        super().__init__(number, "w", closefd=False)
        self.name = name
        self.watch = watch
        self.rest = b""

    def write(self, data):
        count = super().write(data)
        # A line counts when the kernel has it. Only what was really written is looked at.
        *lines, self.rest = (self.rest + bytes(data[:count])).split(b"\n")
        self.rest = self.rest[-MAX_LINE - 1 :]
        if b"\r" in self.rest:  # a progress bar that never ends its line
            head, _, self.rest = self.rest.rpartition(b"\r")
            lines.append(head)
        for line in lines:
            self.watch.line(line)
        return count


def watched_stream(stream, watch):
    """A text stream like `stream`, but flushed at every line (as on a terminal) and watched."""
    raw = WatchedFile(stream.fileno(), stream.name, watch)
    binary = raw if stream.write_through else io.BufferedWriter(raw)  # with `python -u` there is no buffer
    made = io.TextIOWrapper(
        binary, stream.encoding, stream.errors, newline="\n", line_buffering=True, write_through=stream.write_through
    )
    made.mode = stream.mode
    return made


class AfterImport:
    """A finder that lets the real ones find `name`, and calls `then(module)` once that module is executed.

    So an observer can wait for a framework: nothing is imported that the script does not import itself.
    """

    broken = None  # what an observer raised when it was to begin

    def __init__(self, name, then):
        self.name = name
        self.then = then
        self.loader = None
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        self.remove()
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            self.loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        try:
            self.then(module)
        except Exception as error:
            AfterImport.broken = error

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def remove(self):
        if self in sys.meta_path:
            sys.meta_path.remove(self)


@contextlib.contextmanager
def library():
    """Within, imports find the standard library, whatever the script has under those names."""
    path, modules = list(sys.path), dict(sys.modules)
    sys.path[:] = LIBRARY
    sys.modules.update(OURS)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in sys.modules.keys() - modules.keys():
            del sys.modules[name]
        sys.modules.update(modules)


def load(path):
    """The names that the Python file at `path` defines; it becomes no module, so nobody can import it."""
    namespace = {"__name__": "<inside>", "__file__": path, "__builtins__": __builtins__}
    with open(path, encoding="utf-8") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    with library():
        exec(code, namespace)
    return namespace


@library()
def describe(error):
    """What an exception says, as data: the chain, outermost first, and the traceback as Python prints it.

    Each link has its type and bases, message, frames (outermost first), `raised` (whether a `raise` or `assert` of
    the innermost frame made it, not C code called there), `code` (that frame's line), and how it hangs on the link
    before: `cause`, `context`, or `member` of a group.
    """
    error.__traceback__ = users_part(error.__traceback__)
    chain, seen, todo = [], set(), [("", error)]
    while todo and len(chain) < MAX_CHAIN:
        relation, current = todo.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        frames, raised, code = frames_of(current)
        kind = type(current)
        try:
            message = str(current)
        except BaseException as broken:
            message = f"<its __str__ raised {type(broken).__name__}>"
        chain.append(
            {
                "type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
                "bases": [f"{base.__module__}.{base.__qualname__}".removeprefix("builtins.") for base in kind.__mro__],
                "message": shorten(message),
                "relation": relation,
                "frames": frames,
                "raised": raised,
                "code": code,
            }
        )
        members = getattr(current, "exceptions", ())
        if isinstance(members, tuple):
            todo += [("member", member) for member in members if isinstance(member, BaseException)]
        if current.__cause__ is not None:
            todo.append(("cause", current.__cause__))
        elif current.__context__ is not None and not current.__suppress_context__:
            todo.append(("context", current.__context__))
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception as broken:
        text = f"<the traceback cannot be formatted: {type(broken).__name__}>"
    return {"chain": chain, "traceback": shorten(text)}


def frames_of(error):
    """The innermost frames of an exception, whether the last of them raised it, and the line that stands there."""
    frames, trace, raised, code = collections.deque(maxlen=MAX_FRAMES), error.__traceback__, False, ""
    while trace is not None:
        executed, module = trace.tb_frame.f_code, trace.tb_frame.f_globals.get("__name__")
        frames.append(
            {
                "file": executed.co_filename,
                "line": trace.tb_lineno or 0,
                "function": executed.co_name,
                "module": module if isinstance(module, str) else None,
            }
        )
        if trace.tb_next is None:
            raised = opcode.opname[executed.co_code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")
            code = linecache.getline(executed.co_filename, trace.tb_lineno or 0).strip()[:200]
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and isinstance(error.filename, str):
        frames.append({"file": error.filename, "line": error.lineno or 1, "function": "<module>", "module": None})
    return list(frames), raised, code


def peak_memory_bytes():
    """The largest resident size of this process so far, in bytes.

    Of the program that runs now: getrusage counts what the process was before it, too, on Linux a copy of its launcher.
    """
    try:
        with open("/proc/self/status", "rb") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(b"VmHWM:"))
    except (OSError, StopIteration):  # no Linux, or one that hides it
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, on macOS bytes
        return size if sys.platform == "darwin" else size * 1024


def redirect(folder, rank):
    """Send this process's output to the pipe that the supervisor drains into `rank-N.log`."""
    pipe = os.path.join(folder, f"rank-{rank}.out")
    if os.path.exists(pipe):
        file = os.open(pipe, os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)


def run_script(path, arguments):
    """Execute the script as `__main__`, exactly as the interpreter does."""
    absolute = os.path.abspath(path)
    main = type(sys)("__main__")
    main.__dict__.update(dict.fromkeys(NAMES - main.__dict__.keys()))
    if "__annotations__" in NAMES:
        main.__annotations__ = {}
    main.__file__ = absolute
    main.__builtins__ = sys.modules["builtins"]
    main.__loader__ = type(__loader__)("__main__", absolute)
    sys.argv = [path, *arguments]
    sys.orig_argv = [*sys.orig_argv[:-2], *sys.argv]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(absolute))
    # What this file has imported is the script's to import: it may have a module of that name itself.
    for name in sys.modules.keys() - AT_START:
        del sys.modules[name]
    sys.modules["__main__"] = main
    with open(absolute, "rb") as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def users_part(trace):
    """A traceback from the user's first frame on."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def wait_for_threads():
    """Let the script's threads end, as the interpreter does after `__main__`, so that all of their work is seen."""
    threading = sys.modules.get("threading")
    with contextlib.suppress(Exception):  # no thread was ever started, or the module is the user's own
        if any(not each.daemon and each is not threading.main_thread() for each in threading.enumerate()):
            threading._shutdown()


def begin(settings, name):
    """Watch this process: what it tells goes to NAME.events."""
    events = Events(os.path.join(settings["folder"], f"{name}.events"))
    events.emit(
        "start",
        pid=os.getpid(),
        host=os.uname().nodename,
        interpreter=sys.executable,
        python=sys.version.split()[0],
    )
    observer = load(settings["observer"])["observe"](AfterImport)
    watch = Watch(events, observer, re.compile(settings["progress"]) if settings["progress"] else None)
    observer.enough = watch.look
    if settings.get("task"):  # what is to be shown without the accelerator (`matrix.evidence`)
        observer.task, observer.emit = settings["task"], events.emit
    sys.stdout = sys.__stdout__ = watched_stream(sys.stdout, watch)
    sys.stderr = sys.__stderr__ = watched_stream(sys.stderr, watch)
    return events, observer, watch


def end(events, observer, watch):
    """Tell what is known when a process comes to its end."""
    with contextlib.suppress(Exception):  # the script may have closed or replaced it
        sys.stdout.flush()
    watch.look()  # where there were fewer lines than looks
    try:
        final = observer.final()
    except Exception as error:
        watch.blind(error)
        final = {"graphs": 0, "device_peak_bytes": None, "warm": None}
    events.emit("end", peak_memory_bytes=peak_memory_bytes(), **final)


class Adoption:
    """Pickles as a call of `adopt` in the process that loads it: a child that the script spawns is watched, too."""

    def __init__(self, settings_file, number):
        self.settings_file = settings_file
        self.number = number

    def __reduce__(self):
        names = {"__name__": "<inside>", "__file__": __file__}
        run = f"exec(compile(open({__file__!r}, encoding='utf-8').read(), {__file__!r}, 'exec'), n)"
        return exec, (f"(lambda n: ({run}, n['adopt']({self.settings_file!r}, {self.number})))({names!r})", {})


def adopt(settings_file, number):
    """Watch a process that multiprocessing spawned; told before it loads the script or runs its target."""
    with open(settings_file, encoding="utf-8") as file:
        settings = json.load(file)
    for name in sys.modules.keys() - AT_START:
        del sys.modules[name]
    process = sys.modules["multiprocessing.process"].BaseProcess
    original = process.run

    watched = begin(settings, f"rank-{number}")

    def run(self):
        process.run = original
        try:
            return self.run()
        finally:
            end(*watched)

    process.run = run


def adopt_children(settings_file):
    """Have every process that the script spawns watched (one that it forks is a copy: a data loader, say)."""

    def hook(spawn):
        original = spawn.get_preparation_data
        spawned = 0

        def get_preparation_data(name):
            nonlocal spawned
            spawned += 1  # rank r of torch.multiprocessing.spawn is r + 1: the script's own process is 0
            return {**original(name), "portmatrix": Adoption(settings_file, spawned)}

        spawn.get_preparation_data = get_preparation_data

    AfterImport("multiprocessing.spawn", hook)


def work(settings, settings_file):
    """Run one rank of one attempt; returns only when the script came to its end by itself."""
    rank = int(os.environ.get("RANK", "0")) if settings["ranked"] else 0
    folder = settings["folder"]
    redirect(folder, rank)
    events, observer, watch = begin(settings, f"rank-{rank}")
    if not settings["ranked"]:
        adopt_children(settings_file)
    if settings["faults"]:
        import faulthandler

        # The descriptor lives as long as the process: a crash is reported from a signal handler.
        faulthandler.enable(os.open(os.path.join(folder, f"rank-{rank}.crash"), os.O_WRONLY | os.O_CREAT, 0o644))

    def finish():
        end(events, observer, watch)

    try:
        run_script(settings["script"], settings["arguments"])
    except SystemExit as error:
        code = int(error.code) if isinstance(error.code, int) else (0 if error.code is None else 1)
        told = describe(error) if code else {}
        events.emit("exit", code=code, **told)
        wait_for_threads()
        finish()
        raise
    except BaseException as error:
        events.emit("exception", **describe(error))
        finish()
        hook = sys.excepthook
        sys.excepthook = lambda kind, error, trace: hook(
            kind, error.with_traceback(users_part(trace)), users_part(trace)
        )
        raise
    wait_for_threads()
    finish()


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        read = json.load(file)
    work(read, sys.argv[1])
