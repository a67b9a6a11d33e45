"""One attempt: the command and the environment of a source in a cell, its run, and the record of it."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import shlex
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import filelock

from matrix import changes, outcome
from matrix.environments import Interpreter, cores
from matrix.failures import signature
from matrix.journal import AttemptRecord, Devices, Failure, Metrics, Target, Throughput
from matrix.keys import key
from matrix.launch import commands, process
from matrix.launch.process import Observation, Order
from matrix.outcome import LOOKS, Judged
from matrix.plan import Cell
from matrix.workload import Source

WORKER = Path(__file__).parent / "inside" / "worker.py"
MEASURE_LOCK = Path(tempfile.gettempdir()) / "portmatrix-measure.lock"  # held by whoever measures on this machine
INTERVALS = 10  # fewer steady intervals than that are no measurement

Phase = Literal["correctness", "measurement"]

# Set by whatever started this tool; a cell begins its own world.
FOREIGN = ("PYTEST_", "TORCHELASTIC_", "GROUP_", "ROLE_")
FOREIGN_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@contextlib.contextmanager
def alone(say: Callable[[str], None]) -> Iterator[None]:
    """Hold the machine for a measurement: no other run measures at the same time.

    Args:
        say: is told what keeps it waiting, or that this could not be made sure of.
    """
    lock = filelock.FileLock(MEASURE_LOCK, mode=0o666)
    try:
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            say("waiting until another run on this machine has measured")
            lock.acquire()
    except OSError as error:  # another user's file in a shared folder
        say(f"whether another run measures beside this one is not known: {error}")
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True)
class Context:
    """What all attempts of a run share.

    Attributes:
        run: the run's id.
        machine: the machine's id.
        folder: the run's folder, where attempts get folders of their own.
        interpreters: by backend; those that have an absent accelerator's compiler, by `BACKEND-ACCELERATOR`.
        host: the machine in words.
        prior: attempts of the same run that a resumed run need not repeat.
        live: whether output is shown while it is written.
        beside: cells that run at the same time; they share the cores.
    """

    run: str
    machine: str
    folder: Path
    interpreters: Mapping[str, Interpreter]
    host: Mapping[str, Any]
    prior: tuple[AttemptRecord, ...] = ()
    live: bool = False
    beside: int = 1


def now() -> str:
    """The time as RFC 3339, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def blank(
    context: Context,
    cell: Cell,
    source: Source | None,
    phase: Phase = "correctness",
    where: Interpreter | None = None,
    more: object = None,
) -> dict[str, Any]:
    """The fields of a record that are known before anything ran.

    Args:
        where: the interpreter, if it is not the backend's.
        more: what else decides how the attempt comes out, for its key.
    """
    interpreter = where or context.interpreters[cell.backend.name]
    baseline = cell.sources()[0]
    return {
        "run": context.run,
        "machine": context.machine,
        "cell": cell.id,
        "key": key(cell, source, interpreter, phase, more),
        "phase": phase,
        "axes": dict(cell.axes),
        "implementation": cell.implementation.name if cell.implementation else None,
        "source": source.name if source else None,
        "role": source.role if source else None,
        "changes": changes.count(baseline.file, source.file) if source and baseline and source.role == "port" else None,
        "started": now(),
    }


def unavailable(context: Context, cell: Cell, reason: str, target: Target | None = None) -> AttemptRecord:
    """The record of a cell of which nothing can be executed here, or be shown for one target."""
    known = blank(context, cell, cell.sources()[0])
    return AttemptRecord(**known, outcome="unavailable", reason=reason, target=target)


def perform(context: Context, cell: Cell, source: Source, phase: Phase) -> AttemptRecord:
    """Run a source once in a cell, and judge it."""
    known = blank(context, cell, source, phase)
    interpreter = context.interpreters[cell.backend.name]
    steps, log_every = cell.run.steps, cell.run.log_every
    if phase == "measurement":
        steps, log_every = cell.run.measure.steps, cell.run.measure.log_every
    devices = cell.layout.devices
    added = variables(cell, commands.ranks(source.launch, devices), context.beside if phase == "correctness" else 1)
    limits = Limits(cell.run.timeout, cell.run.no_progress)
    folder = new_folder(context.folder / "attempts" / cell.id, phase)
    script = [source.name, *script_arguments(cell, steps, log_every), *source.arguments]
    order = watched(context, cell, source, interpreter, cell.backend.observer, script, folder, devices, added, limits)
    seen = process.run(order, lambda so_far: outcome.is_untrue(cell, so_far))
    judged = outcome.judge(cell, seen, *asked(cell, steps, log_every))
    assert interpreter.path is not None
    by_hand = commands.command(source.launch, interpreter.path, script, devices)
    return AttemptRecord(
        **known,
        outcome=judged.outcome,
        evidence="executed",
        reason=judged.reason,
        failure=_explained(judged.failure, cell, interpreter),
        metrics=_metrics(cell, seen, judged, phase),
        devices=_devices(cell, seen, judged),
        precision=judged.precision,
        **circumstances(context, cell, interpreter, seen, added, by_hand),
    )


@dataclass(frozen=True)
class Limits:
    """What an attempt may take; in seconds, and in bytes for all of its processes together (None: no limit)."""

    timeout_s: float
    no_progress_s: float
    memory_bytes: int | None = None


def watched(
    context: Context,
    cell: Cell,
    source: Source,
    interpreter: Interpreter,
    observer: Path,
    script: list[str],
    folder: Path,
    devices: int,
    added: Mapping[str, str],
    limits: Limits,
    task: Mapping[str, Any] | None = None,
) -> Order:
    """The order to run a source under the worker.

    Args:
        observer: what looks at it inside.
        script: the source's file and its arguments.
        folder: the attempt's own.
        devices: how many it is given on this host.
        added: the variables that it gets.
        task: what the observer is told, where something is to be shown without the accelerator.
    """
    assert interpreter.path is not None
    settings = {
        "script": script[0],
        "arguments": script[1:],
        "folder": str(folder),
        "observer": str(observer),
        "progress": cell.workload.progress,
        "ranked": source.launch is not None,
        "faults": True,
        "task": task,
    }
    settings_file = folder / "settings.json"
    settings_file.write_text(json.dumps(settings))
    return Order(
        command=commands.command(source.launch, interpreter.path, [str(WORKER), str(settings_file)], devices),
        environment=own(os.environ) | dict(added),
        cwd=cell.workload.folder,
        folder=folder,
        ranks=commands.ranks(source.launch, devices),
        timeout_s=limits.timeout_s,
        no_progress_s=limits.no_progress_s,
        progress=cell.workload.progress,
        echo=context.live,
        memory_bytes=limits.memory_bytes,
    )


def asked(cell: Cell, steps: int, log_every: int) -> tuple[int | None, int | None]:
    """The steps that a script was asked for, and every how many for a line; None where it takes no such argument."""
    takes = cell.workload.arguments
    return steps if "steps" in takes else None, log_every if "log_every" in takes else None


def script_arguments(cell: Cell, steps: int, log_every: int) -> list[str]:
    """The script's command line: the settings that the workload declares, the backend's switches, the axes' own."""
    values = {
        "steps": steps,
        "size": cell.run.size,
        "seed": cell.run.seed,
        "dtype": cell.run.dtype,
        "log_every": log_every,
    }
    words: list[str] = []
    for name, flag in cell.workload.arguments.items():
        if name in values:
            words += [flag + str(values[name])] if flag.endswith("=") else [flag, str(values[name])]
        elif name in cell.backend.flags:
            words.append(flag)
    return words + cell.arguments


def variables(cell: Cell, ranks: int, beside: int) -> dict[str, str]:
    """The variables that a cell gets: its backend's, its accelerator's, threads for each process, and its axes' own."""
    return {
        **threads(ranks, beside),
        **cell.backend.environment,
        **cell.accelerator.environment(cell.backend.through or cell.backend.framework, cell.layout.devices),
        **cell.environment,
    }


def threads(ranks: int, beside: int) -> dict[str, str]:
    """Threads for each of so many processes, of so many cells at a time."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // (ranks * beside))))}


def own(environment: Mapping[str, str]) -> dict[str, str]:
    """What a cell inherits of the variables of this process."""
    return {
        name: value for name, value in environment.items() if not name.startswith(FOREIGN) and name not in FOREIGN_NAMES
    }


def new_folder(parent: Path, kind: str) -> Path:
    """A new folder `KIND-N` for an attempt."""
    for number in itertools.count(1):
        folder = parent / f"{kind}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def _explained(failure: Failure | None, cell: Cell, interpreter: Interpreter) -> Failure | None:
    """A failure in the light of what the probe knows: a framework that never comes up, a device that it never sees."""
    if failure is None:
        return None
    importing = any(
        number == int(failure.frame.rpartition(":")[2]) and text.lstrip().startswith(("import ", "from "))
        for number, text in failure.excerpt
        if failure.frame
    )
    if interpreter.trouble and importing and failure.cause != "missing-package":
        return _relabelled(failure, "broken-install", failure.message)
    sees = interpreter.probe.get("devices", {})
    if failure.cause == "wrong-device" and sees and cell.accelerator.name not in sees:
        version = interpreter.probe.get("version", "")
        message = (
            f"the machine has {cell.accelerator.about}, but {cell.backend.distribution} {version} sees none "
            f"({failure.message})"
        )
        return _relabelled(failure, "missing-device", message)
    return failure


def _relabelled(failure: Failure, cause: str, message: str) -> Failure:
    return failure.model_copy(
        update={"cause": cause, "message": message, "signature": signature(cause, message, failure.frame)}
    )


def _metrics(cell: Cell, seen: Observation, judged: Judged, phase: Phase) -> Metrics:
    lines = seen.of("progress", seen.reporter)
    ends = [end for rank in seen.events if (end := seen.last("end", rank))]
    peaks = [end["device_peak_bytes"] or end["peak_memory_bytes"] for end in ends]
    intervals = steady(lines) if phase == "measurement" and judged.outcome == "pass" else []
    rates = [interval["units"] / interval["seconds"] for interval in intervals if interval["units"]]
    return Metrics(
        loss=judged.losses,
        eval=judged.evaluation,
        deviation=judged.deviation,
        tolerance=judged.tolerance,
        throughput=Throughput(unit=f"{cell.workload.unit}/s", median=statistics.median(rates), samples=rates)
        if len(rates) >= INTERVALS
        else None,
        comparable=not (cell.accelerator.shared and cell.layout.devices > 1),
        startup_s=lines[0]["written"] - seen.started if lines else None,
        step_s=statistics.median(each["seconds"] / each["steps"] for each in intervals)
        if len(intervals) >= INTERVALS
        else None,
        compile_s=max((end["compile_s"] for end in ends if end.get("compile_s") is not None), default=None),
        graphs=max((end["graphs"] for end in ends), default=None),
        settled=lines[-1]["graphs"] == lines[-2]["graphs"] if len(lines) > 2 else None,
        peak_memory_bytes=max((peak for peak in peaks if peak), default=seen.peak_memory_bytes),
    )


def steady(lines: list[process.Event]) -> list[dict[str, float]]:
    """The intervals between progress lines after the probes are gone and the last compilation is over.

    Returns:
        For each: `seconds`, `steps`, and `units` processed (0 where the script does not say).
    """
    begin = min(LOOKS, len(lines)) - 1
    for index in range(1, len(lines)):
        if lines[index]["graphs"] != lines[index - 1]["graphs"]:
            begin = max(begin, index)
    found = []
    for before, line in itertools.pairwise(lines[max(begin, 0) :]):
        seconds, steps = line["written"] - before["written"], line["step"] - before["step"]
        if seconds > 0 and steps > 0:
            found.append({"seconds": seconds, "steps": steps, "units": line["units"] or 0.0})
    return found


def _devices(cell: Cell, seen: Observation, judged: Judged) -> Devices:
    ends = {rank: seen.last("end", rank) or {} for rank in seen.events}
    reports = {  # with what was left to the host's CPU over the whole run
        str(rank): {**report, **{k: v for k, v in ends[rank].items() if k == "fallbacks"}}
        for rank in sorted(seen.events)
        if (report := seen.last("seen", rank))
    }
    dropped = ("event", "time", "shapes", "parameter_shapes")
    return Devices(
        kind=judged.truth.kind,
        expected=cell.layout.nodes * cell.layout.devices,
        used=judged.truth.used,
        detail={rank: {k: v for k, v in report.items() if k not in dropped} for rank, report in reports.items()},
    )


def circumstances(
    context: Context,
    cell: Cell,
    interpreter: Interpreter,
    seen: Observation,
    added: Mapping[str, str],
    by_hand: list[str],
) -> dict[str, Any]:
    """The fields of a record that say how it was run: environment, logs, duration, and the same by hand."""
    end = next((end for rank in sorted(seen.events) if (end := seen.last("end", rank))), {})
    environment = {
        "interpreter": interpreter.path,
        "python": interpreter.python,
        "packages": interpreter.frameworks(),
        "variables": dict(added),
        "warm": end.get("warm"),
        **context.host,
    }
    return {
        "environment": environment,
        "logs": {rank: str(path.relative_to(context.folder)) for rank, path in seen.logs.items()},
        "duration_s": round(seen.duration_s, 3),
        "reproduce": command_line(cell.workload.folder, added, by_hand),
    }


def command_line(folder: Path, added: Mapping[str, str], command: list[str]) -> str:
    """The same by hand, without this tool, as one line for a shell."""
    assignments = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
    return f"cd {shlex.quote(str(folder))} && {' '.join([*assignments, shlex.join(command)])}"
