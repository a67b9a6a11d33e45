"""Run a user's script as `python SCRIPT ARGS...` would, and say from inside what happens.

Run by path in the cell's own interpreter: `python worker.py SETTINGS.json`. Standard library only. What the script
sees is what it would see by hand: `sys.path[0]`, `sys.argv`, `__main__`, the working directory, the standard streams,
exceptions, exit codes; nothing of this package is importable.

What happens is written as JSON lines to `rank-N.events` in the attempt's folder:

    start      the process began: pid, host, rank, interpreter
    progress   a progress line was written: time, step, loss, units, graphs compiled so far
    eval       the closing evaluation was written
    seen       what the observer of the framework saw of devices and data (see `observe_torch.py`, `observe_jax.py`)
    exception  the script raised: type, message, frames
    end        the script came to its end: packages, peak memory

Times are seconds of CLOCK_MONOTONIC, which all processes of one host share.
"""

import sys

AT_START = frozenset(sys.modules)  # what the interpreter itself had loaded

import io  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import time  # noqa: E402

LOOKS = 2  # the observer looks until the second progress line, then it is removed: what is timed runs undisturbed
MAX_LINE = 65536  # a longer line is no progress line
MAX_TEXT = 200_000  # characters of a message or traceback that are kept, half from each end

ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)"
PAIR = re.compile(rf"(?<![\w.])(step|loss|tokens|examples|eval)\s*[=:]\s*({NUMBER})(?![\w.])", re.IGNORECASE)


class Events:
    """The file that tells the controller what happens; one write per event, so that lines never interleave."""

    def __init__(self, path):
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def emit(self, event, **fields):
        record = {"event": event, "time": time.monotonic(), **fields}
        os.write(self.file, json.dumps(record, default=str).encode() + b"\n")


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
        if os.getpid() != self.pid or len(line) > MAX_LINE:  # a forked data loader writes through the same stream
            return
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
        observer = self.observer
        try:
            self.events.emit("seen", **observer.seen())
        except Exception as error:  # a version of the framework that the observer does not know
            self.events.emit("blind", reason=f"{type(error).__name__}: {error}")
        finally:
            observer.remove()


class WatchedFile(io.FileIO):
    """A standard stream's file that shows every written line to the watch."""

    def __init__(self, number, watch):
        super().__init__(number, "w", closefd=False)
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
    raw = WatchedFile(stream.fileno(), watch)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, newline=None, line_buffering=True)


class AfterImport:
    """A finder that lets the real ones find `name`, and calls `then(module)` once that module is executed.

    So an observer can wait for a framework: nothing is imported that the script does not import itself.
    """

    def __init__(self, name, then):
        self.name = name
        self.then = then
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            self.loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.then(module)

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def remove(self):
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def load(path):
    """The names that the Python file at `path` defines; it becomes no module, so nobody can import it."""
    namespace = {"__name__": "<inside>", "__file__": path, "__builtins__": __builtins__}
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), namespace)
    return namespace


def describe(error, root):
    """What an exception says, as data: the chain from the innermost cause outwards and the frames in user code."""
    import traceback

    chain, seen = [], set()
    current = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = [
            {"file": frame.filename, "line": frame.lineno, "function": frame.name}
            for frame in traceback.extract_tb(current.__traceback__, limit=-200)
        ]
        kind = type(current)
        try:
            message = str(current)
        except Exception as broken:
            message = f"<its __str__ raised {type(broken).__name__}>"
        chain.append(
            {
                "type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
                "bases": [f"{base.__module__}.{base.__qualname__}".removeprefix("builtins.") for base in kind.__mro__],
                "message": shorten(message),
                "name": getattr(current, "name", None) if isinstance(current, (ImportError, AttributeError)) else None,
                "frames": frames,
            }
        )
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception as broken:
        text = f"<the traceback cannot be formatted: {type(broken).__name__}>"
    return {"chain": chain, "traceback": shorten(text), "root": root}


def peak_memory_bytes():
    """The largest resident size of this process so far, in bytes (getrusage counts KiB, on macOS bytes)."""
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def packages():
    """Versions of the frameworks' packages that this interpreter has installed."""
    from importlib.metadata import distributions

    wanted = re.compile(
        r"(torch|jax|numpy$|optax$|equinox$|flax$|libtpu|triton|nvidia-|onednn|intel-|rocm)", re.IGNORECASE
    )
    found = {}
    for each in distributions():
        name = each.metadata["Name"]
        if name and wanted.match(name):
            found.setdefault(name.lower(), each.version)
    return found


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
    import builtins
    import importlib.machinery
    import types

    absolute = os.path.abspath(path)
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=absolute,
        __cached__=None,
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", absolute),
    )
    sys.modules["__main__"] = main
    sys.argv = [path, *arguments]
    folder = os.path.dirname(os.path.realpath(absolute))
    if not sys.flags.safe_path if hasattr(sys.flags, "safe_path") else True:
        sys.path[0] = folder
    forget_shadowed(folder)
    with open(absolute, "rb") as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def forget_shadowed(folder):
    """Unload what this file imported and the user's folder has a module of the same name for: theirs goes first."""
    for name in [name for name in sys.modules if name not in AT_START and "." not in name]:
        if os.path.exists(os.path.join(folder, name + ".py")) or os.path.isdir(os.path.join(folder, name)):
            for each in [each for each in sys.modules if each == name or each.startswith(name + ".")]:
                del sys.modules[each]


def work(settings):
    """Run one rank of one attempt; returns only when the script came to its end by itself."""
    import socket

    rank = int(os.environ.get("RANK", "0")) if settings["ranked"] else 0
    folder = settings["folder"]
    redirect(folder, rank)
    events = Events(os.path.join(folder, f"rank-{rank}.events"))
    events.emit(
        "start",
        pid=os.getpid(),
        rank=rank,
        host=socket.gethostname(),
        interpreter=sys.executable,
        python=sys.version.split()[0],
    )
    observer = load(settings["observer"])["observe"](AfterImport)
    watch = Watch(events, observer, re.compile(settings["progress"]) if settings["progress"] else None)
    observer.enough = watch.look
    sys.stdout = watched_stream(sys.stdout, watch)
    sys.stderr = watched_stream(sys.stderr, watch)
    if settings["faults"]:
        import faulthandler

        # The descriptor lives as long as the process: a crash is reported from a signal handler.
        faulthandler.enable(os.open(os.path.join(folder, f"rank-{rank}.crash"), os.O_WRONLY | os.O_CREAT, 0o644))

    def finish():
        sys.stdout.flush()
        watch.look()  # where there were fewer lines than looks
        events.emit("end", packages=packages(), peak_memory_bytes=peak_memory_bytes(), **observer.final())

    try:
        run_script(settings["script"], settings["arguments"])
    except SystemExit as error:
        events.emit("exit", code=error.code if isinstance(error.code, int) else (0 if error.code is None else 1))
        finish()
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error = error.with_traceback(trace)
        events.emit("exception", **describe(error, settings["root"]))
        finish()
        sys.excepthook(type(error), error, trace)
        raise SystemExit(1) from None
    finish()


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        read = json.load(file)
    work(read)
