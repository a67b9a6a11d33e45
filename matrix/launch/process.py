"""Run one attempt's processes under a supervisor, follow their events, and end them when they must end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from matrix.inside.worker import MAX_LINE, read_pairs

SUPERVISOR = Path(__file__).with_name("supervisor.py")
POLL_S = 0.05
KEEP_BYTES = 16 << 20  # of each log; the middle of a longer one is left out
MAX_EVENTS = 64 << 20  # bytes of events of one rank: a script that logs without end must not fill the disk
SPY_S = 10.0  # py-spy answers in milliseconds; a process in uninterruptible sleep never
EXIT_S = 30.0  # for a killed tree to be gone
WEIGH_S = 0.5  # between two looks at the memory of an attempt that may take only so much

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Order:
    """What is to be run.

    Attributes:
        command: the words; executed without a shell.
        environment: all variables of the process.
        cwd: working directory.
        folder: where logs, events and settings of the attempt lie; it exists and is the attempt's own.
        ranks: how many processes report.
        timeout_s: wall-clock limit.
        no_progress_s: limit for the time without any progress line.
        progress: a regex for progress lines that are not `name=value` pairs.
        echo: whether output is also shown on this process's standard error.
        memory_bytes: limit for the resident memory of all its processes together; None for none.
    """

    command: list[str]
    environment: dict[str, str]
    cwd: Path
    folder: Path
    ranks: int
    timeout_s: float
    no_progress_s: float
    progress: str | None = None
    echo: bool = False
    memory_bytes: int | None = None


@dataclass
class Observation:
    """What was observed of an attempt, so far or at its end.

    Attributes:
        started: CLOCK_MONOTONIC when the command was started.
        duration_s: wall-clock time until nothing was left of it.
        code: exit code of the command; negative for a signal; None when it was ended by us.
        ended_by: why we ended it: `timeout`, `hang`, `memory`, `untrue`, or None.
        events: the events of each rank, in order.
        stacks: of ranks that hung, their Python stacks.
        logs: log files, by rank ("launcher" for the command's own output).
        peak_memory_bytes: largest resident size that the system counted for the command.
        progress: the pattern of its progress lines, see `Order`.
        trouble: what went wrong in the tool itself.
    """

    started: float = 0.0
    duration_s: float = 0.0
    code: int | None = None
    ended_by: str | None = None
    events: dict[int, list[Event]] = field(default_factory=dict)
    stacks: dict[str, str] = field(default_factory=dict)
    logs: dict[str, Path] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    progress: str | None = None
    trouble: str | None = None

    def of(self, kind: str, rank: int) -> list[Event]:
        """The events of one kind of a rank."""
        return [event for event in self.events.get(rank, ()) if event["event"] == kind]

    def last(self, kind: str, rank: int) -> Event | None:
        found = self.of(kind, rank)
        return found[-1] if found else None

    def is_progress(self, line: bytes) -> bool:
        """Whether a line of a log is one of progress."""
        pattern = re.compile(self.progress) if self.progress else None
        return {"step", "loss"} <= set(read_pairs(line[:MAX_LINE], pattern))

    @property
    def reporter(self) -> int:
        """The lowest rank that printed progress lines (rank 0 when none did)."""
        return next((rank for rank in sorted(self.events) if self.of("progress", rank)), 0)


class _Events:
    """Reads what was appended to a rank's file of events since the last time."""

    def __init__(self, path: Path):
        self.path = path
        self.position = 0
        self.trouble: str | None = None

    def new(self) -> list[Event]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                data = file.read(MAX_EVENTS - self.position) if self.position < MAX_EVENTS else b""
        except FileNotFoundError:
            return []
        whole, newline, rest = data.rpartition(b"\n")
        self.position += len(whole) + len(newline)
        if self.position + len(rest) >= MAX_EVENTS:
            self.trouble = f"{self.path.name}: the script prints more than {MAX_EVENTS >> 20} MiB of progress lines"
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError:  # a full disk takes a part of a line
            self.trouble = f"{self.path.name} is damaged: what happened in the attempt is not known"
            return []


def run(order: Order, untrue: Callable[[Observation], bool]) -> Observation:
    """Run an attempt to its end, or end it.

    Args:
        order: what to run.
        untrue: asked whenever something new was reported; True ends the attempt at once.

    On return none of its processes is alive, however it ended; also when this call is interrupted.
    """
    seen = Observation(progress=order.progress)
    names = ["launcher", *(f"rank-{rank}" for rank in range(order.ranks))]
    files = {rank: _Events(order.folder / f"rank-{rank}.events") for rank in range(order.ranks)}
    supervisor = subprocess.Popen(
        [sys.executable, "-I", "-S", str(SUPERVISOR)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        task = {
            "command": order.command,
            "environment": order.environment,
            "cwd": str(order.cwd),
            "folder": str(order.folder),
            "pipes": names,
            "keep": KEEP_BYTES,
            "echo": order.echo,
        }
        seen.started = time.monotonic()
        _tell(supervisor, json.dumps(task))
        messages = _follow(order, seen, files, supervisor, untrue)
    finally:
        _release(supervisor)
        for name in names:  # one that was killed could not remove its pipes
            (order.folder / f"{name}.out").unlink(missing_ok=True)
    seen.duration_s = time.monotonic() - seen.started
    _collect(order, seen, files)
    exited = next((message for message in messages if message["event"] == "exited"), None)
    told = [message["trouble"] for message in messages if message.get("trouble")]
    seen.trouble = next(iter([*told, *(file.trouble for file in files.values() if file.trouble)]), None)
    if exited is None:
        seen.trouble = seen.trouble or "the attempt's supervisor ended before it reported"
    else:
        seen.code = exited["code"]
        seen.peak_memory_bytes = exited["peak_memory_bytes"]
    seen.logs = {
        name.removeprefix("rank-"): path
        for name in names
        if (path := order.folder / f"{name}.log").exists() and (name != "launcher" or path.stat().st_size)
    }
    return seen


def _tell(supervisor: subprocess.Popen[bytes], line: str) -> None:
    assert supervisor.stdin
    with contextlib.suppress(BrokenPipeError):  # it is gone; that it never reported is seen later
        supervisor.stdin.write(line.encode("utf-8", "surrogateescape") + b"\n")
        supervisor.stdin.flush()


def _release(supervisor: subprocess.Popen[bytes]) -> None:
    """Let go of the lifeline, and wait until nothing is left."""
    assert supervisor.stdin
    assert supervisor.stdout
    with contextlib.suppress(BrokenPipeError):
        supervisor.stdin.close()
    try:
        supervisor.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()
    supervisor.stdout.close()


def _follow(
    order: Order,
    seen: Observation,
    files: dict[int, _Events],
    supervisor: subprocess.Popen[bytes],
    untrue: Callable[[Observation], bool],
) -> list[Event]:
    """Wait for the end, reading events; returns the supervisor's messages."""
    assert supervisor.stdout
    output = supervisor.stdout.fileno()
    text, news, killing, weigh = b"", seen.started, math.inf, seen.started
    while time.monotonic() < killing + EXIT_S:
        if select.select([output], [], [], POLL_S)[0]:
            data = os.read(output, 65536)
            text += data
            if not data or b'"exited"' in text:
                break
        if killing < math.inf:
            continue
        now = time.monotonic()
        if _collect(order, seen, files):
            news = now
            if untrue(seen):
                seen.ended_by = "untrue"
        if seen.ended_by is None and now - seen.started > order.timeout_s:
            seen.ended_by = "timeout"
        if seen.ended_by is None and now - news > order.no_progress_s:
            seen.ended_by = "hang"
        if seen.ended_by is None and order.memory_bytes is not None and now >= weigh:
            weigh = now + WEIGH_S
            if resident(supervisor.pid) > order.memory_bytes:
                seen.ended_by = "memory"
        if seen.ended_by is not None:
            if seen.ended_by in ("timeout", "hang"):
                seen.stacks = stacks(seen)
            _tell(supervisor, "kill")
            killing = now
    return [json.loads(line) for line in text.splitlines()]


def _collect(order: Order, seen: Observation, files: dict[int, _Events]) -> bool:
    new = False
    for path in order.folder.glob("rank-*.events"):  # also of processes that the script spawned by itself
        rank = int(path.stem.removeprefix("rank-"))
        if rank not in files:
            files[rank] = _Events(path)
    for rank, file in files.items():
        events = file.new()
        if events:
            new = True
            seen.events.setdefault(rank, []).extend(events)
    return new


def resident(pid: int) -> int:
    """Bytes of memory that a process and all below it occupy."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += each.memory_info().rss
    return total


def stacks(seen: Observation) -> dict[str, str]:
    """The Python stack of every rank that is alive, from outside (py-spy), and its state."""
    tool = shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")
    found = {}
    for rank in sorted(seen.events):
        start = seen.last("start", rank)
        if start is None or not psutil.pid_exists(start["pid"]):
            continue
        if tool is None:
            found[str(rank)] = "py-spy is not installed, so that no stack can be shown"
            continue
        try:
            answer = subprocess.run(
                [tool, "dump", "--nonblocking", "--full-filenames", "--pid", str(start["pid"])],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SPY_S,
            )
            found[str(rank)] = (answer.stdout or answer.stderr).strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            found[str(rank)] = f"py-spy could not read the process: {error}"
    return found


# Its table at the end, and what it says at once: "failed (exitcode: -9) local_rank: 1 (pid: 4711) of binary"
EXITED = re.compile(r"exitcode\s*:\s*(-?\d+)\)?(?: local_rank: \d+)?\s*\(pid:\s*(\d+)\)")


def rank_codes(seen: Observation) -> dict[int, int]:
    """Exit codes of ranks as the launcher reports them (torchrun's log and table of failures), the first one first."""
    log = seen.logs.get("launcher")
    if log is None:
        return {}
    pids = {start["pid"]: rank for rank in seen.events if (start := seen.last("start", rank))}
    text = log.read_text("utf-8", "replace")
    return {pids[int(pid)]: int(code) for code, pid in EXITED.findall(text) if int(pid) in pids}
