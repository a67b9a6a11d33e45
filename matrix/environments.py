"""Which interpreter a cell runs in, and what interpreters and the machine can do: asked once per run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from matrix.backends import Backend
from matrix.errors import UsageError, nearest

PROBE_S = 180.0  # the first import of a framework on a cold disk takes a minute; a driver that hangs takes for ever

FRAMEWORKS = re.compile(r"torch|jax|numpy$|optax$|equinox$|flax$|libtpu|triton|nvidia-|onednn|intel-|rocm")

_PACKAGES = """
import json, sys
from importlib.metadata import distributions
found = {}
for each in distributions():
    name = each.metadata["Name"]
    if name: found.setdefault(name.lower().replace("_", "-"), each.version)
print(json.dumps({"python": sys.version.split()[0], "executable": sys.executable, "packages": found}))
"""


@dataclass(frozen=True)
class Compiler:
    """A backend's interpreter that shall also have the compiler of an accelerator that is absent.

    Attributes:
        name: `BACKEND-ACCELERATOR`, as `--python` and `environments:` know it.
        packages: the distributions that make up the compiler.
    """

    backend: Backend
    name: str
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Interpreter:
    """What was found out about one backend's interpreter.

    Attributes:
        path: the interpreter, or None when none has the backend's package.
        origin: where it was named (`--python`, `environments:`, `current`).
        python: its version.
        packages: every installed distribution and version.
        probe: what the framework said of itself and its devices (`probe_torch.py`, `probe_jax.py`).
        trouble: why the framework does not come up although it is installed.
        absent: why there is no interpreter, in words.
    """

    path: str | None
    origin: str = ""
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    probe: Mapping[str, Any] = field(default_factory=dict)
    trouble: str | None = None
    absent: str | None = None

    def fingerprint(self) -> str:
        """A digest of what decides how a script runs in it: interpreter, version and all packages."""
        text = json.dumps([self.path, self.python, sorted(self.packages.items())])
        return hashlib.sha256(text.encode()).hexdigest()

    def frameworks(self) -> dict[str, str]:
        """Versions of the packages that decide what a framework does."""
        return {name: version for name, version in self.packages.items() if FRAMEWORKS.match(name)}

    def as_data(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def parse_python_options(options: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """`["torch=/venv/bin/python"]` -> `{"torch": "/venv/bin/python"}`.

    Args:
        options: as they were given.
        names: backends, and backends on one accelerator (`jax-tpu`).

    Raises:
        UsageError: not of that form, an unknown backend, or no such interpreter.
    """
    names = list(names)
    chosen = {}
    for option in options:
        name, equals, path = option.partition("=")
        if not equals or not path:
            raise UsageError(f"--python takes BACKEND=PATH, got '{option}'")
        if name not in names:
            raise UsageError(f"--python: unknown backend '{name}': {nearest(name, names)}")
        chosen[name] = _existing(path, f"--python {name}")
    return chosen


def _existing(path: str, origin: str) -> str:
    expanded = Path(path).expanduser()
    if expanded.is_dir():  # a virtual environment's folder
        expanded = expanded / "bin" / "python"
    if not expanded.is_file() or not os.access(expanded, os.X_OK):
        raise UsageError(f"{origin}: '{path}' is no interpreter that can be executed")
    return os.path.abspath(expanded)  # never resolved: a venv's python is a link, and the link is the environment


def find(
    backends: Iterable[Backend],
    chosen: Mapping[str, str],
    defined: Mapping[str, str] | None = None,
    compilers: Iterable[Compiler] = (),
) -> dict[str, Interpreter]:
    """The interpreter of each backend: the first of `--python`, the definition's, the current one that has the package.

    Args:
        backends: the backends of the plan.
        chosen: interpreters from the command line, by backend or compiler.
        defined: interpreters from the definition, likewise; one that does not exist is passed over.
        compilers: what is looked for besides: of the candidates with the backend's package the first that has all of
            the compiler's, else the first. An interpreter that is named for a compiler comes before its backend's.

    Child processes ask; this process imports no framework.
    """
    wanted, besides = list(backends), list(compilers)
    candidates = {backend.name: _candidates((backend.name,), chosen, defined or {}) for backend in wanted}
    candidates |= {each.name: _candidates((each.name, each.backend.name), chosen, defined or {}) for each in besides}
    paths = sorted({path for each in candidates.values() for _, path in each})
    children = _Children()
    with ThreadPoolExecutor(4) as pool:
        try:
            answers = pool.map(lambda path: children.ask([path, "-c", _PACKAGES], "packages"), paths)
            asked = dict(zip(paths, answers, strict=True))
            picked = {b.name: _pick(b, candidates[b.name], asked) for b in wanted}
            probes = {(i.path, str(b.probe)) for b in wanted if (i := picked[b.name]).path is not None}
            order = sorted((path or "", probe) for path, probe in probes)
            said = dict(zip(order, pool.map(lambda each: children.ask(list(each), "version"), order), strict=True))
        except BaseException:  # Ctrl-C: the pool waits for its threads, they for their children
            children.end_all()
            raise
    found = {}
    for backend in wanted:
        interpreter = picked[backend.name]
        if interpreter.path is not None:
            probe, trouble = said[interpreter.path, str(backend.probe)]
            interpreter = replace(interpreter, probe=probe, trouble=trouble)
        found[backend.name] = interpreter
    return found | {each.name: _pick(each.backend, candidates[each.name], asked, each.packages) for each in besides}


def _candidates(names: tuple[str, ...], chosen: Mapping[str, str], defined: Mapping[str, str]) -> list[tuple[str, str]]:
    """Origin and path of the interpreters that may serve what has these names, the nearest name first."""
    for name in names:
        if name in chosen:  # what a person asks for is not replaced by another
            return [("--python", chosen[name])]
    there = [defined[name] for name in names if name in defined and os.access(defined[name], os.X_OK)]
    return [*(("environments", os.path.abspath(path)) for path in there), ("current", sys.executable)]


def _pick(
    backend: Backend,
    candidates: list[tuple[str, str]],
    asked: Mapping[str, tuple[dict[str, Any], str | None]],
    packages: tuple[str, ...] = (),
) -> Interpreter:
    reasons, found = [], []
    for origin, path in candidates:
        answer, trouble = asked[path]
        if trouble is not None:
            reasons.append(f"{path}: {trouble}")
        elif backend.distribution.lower() in answer["packages"]:
            found.append(Interpreter(path, origin, answer["python"], answer["packages"]))
        else:
            reasons.append(f"{path} has no package '{backend.distribution}'")
    if found:
        return next((each for each in found if all(name in each.packages for name in packages)), found[0])
    return Interpreter(None, absent=f"{backend.distribution} is not installed: " + "; ".join(reasons))


class _Children:
    """Interpreters that are being asked; each with all that it starts ends when it is late, or when we are."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen[str]] = set()

    def ask(self, command: list[str], has: str) -> tuple[dict[str, Any], str | None]:
        """The last line of a command's output that is a JSON object with the key `has`; else why there is none."""
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return {}, f"cannot be started: {error.strerror or error}"
        self.running.add(child)
        try:
            out, err = child.communicate(timeout=PROBE_S)
        except subprocess.TimeoutExpired:
            return {}, f"did not answer within {PROBE_S:.0f} s"
        finally:
            self.end(child)
        said = _last_line(err)
        if child.returncode < 0:
            return {}, f"died of signal {-child.returncode}" + (f": {said}" if said else "")
        if child.returncode:
            return {}, said or f"ended with exit code {child.returncode}"
        for line in reversed(out.splitlines()):  # frameworks and their plug-ins print banners, before and after
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(line)
                if isinstance(answer, dict) and has in answer:
                    return answer, None
        return {}, f"printed no answer: {out[-200:]!r}"

    def end(self, child: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        self.running.discard(child)

    def end_all(self) -> None:
        for child in list(self.running):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:500] if lines else ""


def host() -> dict[str, Any]:
    """The machine in words: os, cpu model, cores that may be used, memory in bytes."""
    return {
        "os": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "cpu": _cpu(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def cores() -> int:
    """Cores that this process may use (its affinity, not what the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # no /proc: not Linux
        return platform.processor() or platform.machine()
    return platform.machine()


def machine_id() -> str:
    """A name for this machine that stays the same over runs: host name, and a digest of what it is."""
    facts = host()
    digest = hashlib.sha256(json.dumps([facts["cpu"], facts["cores"], facts["memory_bytes"]]).encode()).hexdigest()
    return f"{platform.node() or 'host'}-{digest[:6]}"
