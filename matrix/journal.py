"""The record kinds of a run and the append-only file that holds them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from matrix.errors import ToolError

SCHEMA = 1

Outcome = Literal["pass", "fail", "unavailable", "error"]
Evidence = Literal["executed", "compiled", "traced", "lowered", "none"]


class Record(BaseModel):
    """Base of all records: immutable, and tolerant of fields that a newer version of the tool adds."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True, ser_json_inf_nan="strings")


class Layout(Record):
    """Nodes x devices per node, and how the work is laid on them."""

    name: str
    nodes: int = 1
    devices: int = 1
    strategy: str = "single"


class Expectation(Record):
    """A known failure of a cell: `cause` is expected for `reason` until the day `until` (ISO date) has passed."""

    cause: str
    reason: str
    until: str | None = None
    link: str | None = None


class PlannedCell(Record):
    """A cell as the run planned it; every one has a row in every report."""

    cell: str
    axes: dict[str, str]
    layout: Layout
    unit: str = "examples"
    written_for: str | None = None
    expectation: Expectation | None = None
    required: bool = False
    sources: tuple[str, ...] | None = None
    """The scripts that serve it, the baseline first; None in a journal that does not say."""


class Reference(Record):
    """The float64 trajectory of a workload, and the relative tolerance for each matmul precision."""

    loss: list[tuple[int, float]]
    eval: float | None = None
    """The evaluation after the last step."""
    evaluations: dict[int, float] = {}
    """Evaluations after earlier steps, where the reference has some."""
    tolerance: dict[str, float]
    holds_for: dict[str, str] = {}
    """Settings of a run (size, seed, dtype) with which it was made; another run has no reference."""

    @property
    def reach(self) -> int:
        """How many steps it covers; it counts from 0 or from 1."""
        return self.loss[-1][0] + (self.loss[0][0] == 0)


class RunRecord(Record):
    """First record of a journal: what was planned, with which tool, where."""

    kind: Literal["run"] = "run"
    schema_: int = Field(SCHEMA, alias="schema")
    run: str
    machine: str
    started: str
    tool: str
    definition: str
    definition_path: str
    selection: str = ""
    plan: list[PlannedCell]
    references: dict[str, Reference] = {}
    """By workload, or by `workload/implementation` where an implementation has its own."""
    sources: dict[str, str] = {}
    """Text of every script in the plan, by `workload/file`."""
    host: dict[str, Any] = {}
    """The machine in words: os, arch, cpu, cores, memory_bytes; and the interpreters, by backend."""
    notices: list[str] = []


class ResumeRecord(Record):
    """A later invocation that continues the same journal; its plan replaces the earlier one."""

    kind: Literal["resume"] = "resume"
    started: str
    tool: str
    selection: str = ""
    plan: list[PlannedCell]
    references: dict[str, Reference] = {}
    sources: dict[str, str] = {}
    notices: list[str] = []


class Failure(Record):
    """Why an attempt did not pass: the cause first, then the place in the user's code, then the rest."""

    cause: str
    message: str
    signature: str = ""
    rank: int | None = None
    frame: str | None = None
    """`file:line` of the innermost frame in the user's code."""
    excerpt: list[tuple[int, str]] = []
    """Numbered lines of the user's code around that frame."""
    traceback: str | None = None
    stacks: dict[str, str] = {}
    """By rank: the stack of a process that hung."""
    followers: dict[str, str] = {}
    """By rank: what ranks that failed after the first one said."""


class Throughput(Record):
    """Work per second over the steady intervals of one process."""

    unit: str
    median: float
    samples: list[float] = []


class Metrics(Record):
    """What an attempt measured. Times in seconds, memory in bytes; None is "not measured"."""

    loss: list[tuple[int, float]] = []
    eval: float | None = None
    deviation: float | None = None
    """Largest |loss - reference| / |reference| over the logged steps and the eval."""
    tolerance: float | None = None
    throughput: Throughput | None = None
    comparable: bool = True
    """False where several devices are one piece of hardware (forced host devices, ranks on one CPU)."""
    startup_s: float | None = None
    step_s: float | None = None
    compile_s: float | None = None
    graphs: int | None = None
    settled: bool | None = None
    """Whether nothing was compiled between the last two progress lines; None when there are fewer than three."""
    peak_memory_bytes: int | None = None


class Devices(Record):
    """The devices that a cell gave its script, and those that were seen at work."""

    kind: str = ""
    expected: int = 1
    used: int | None = None
    detail: dict[str, Any] = {}
    """What the probes saw: parameter bytes per device, work share, fingerprints of inputs."""


class Changes(Record):
    """A port against its baseline, after formatting and comments are normalised."""

    added: int
    deleted: int
    hunks: int


class Target(Record):
    """The chips that an absent accelerator's cell was compiled for."""

    accelerator: str
    name: str
    """As the definition writes it: `v5e:2x2`, `h100`; `any` where the evidence is about no particular chip."""
    slices: int = 1
    about: str = ""
    """For a person: `2 slices of TPU v5e 2x2`."""
    devices: int | None = None
    """How many chips there are, over all slices; None where there can be any number."""
    memory_bytes: int | None = None
    """Of one chip."""
    kind: str = ""
    """What the compiler calls the chip."""
    compiler: str = ""
    """Its package and version."""


class Function(Record):
    """A jitted function or a captured graph, compiled for a target. Numbers are those of one device."""

    name: str
    calls: int = 1
    devices: int = 1
    compile_s: float | None = None
    cached: bool = False
    """Whether an earlier compilation of the same program for the same target by the same compiler was used."""
    collectives: dict[str, int] = {}
    """How often each stands in the optimised program."""
    peak_bytes: int | None = None
    argument_bytes: int | None = None
    flops: float | None = None
    bytes: float | None = None
    """Moved to and from memory."""
    scans_counted_once: int = 0
    """Loops in the optimised program; `flops` and `bytes` count the body of each once, however often it runs."""


class Compiled(Record):
    """What a target's compiler made of a source."""

    functions: list[Function] = []
    recompiles: int = 0
    """Programs beyond the first of each function: it was called with other shapes."""
    notes: list[str] = []
    """What a reader should know: host syncs, operators that fall back to the CPU, what was left out."""


class AttemptRecord(Record):
    """One run of one source in one cell; or, without the cell's accelerator, what else shows something of it."""

    kind: Literal["attempt"] = "attempt"
    schema_: int = Field(SCHEMA, alias="schema")
    run: str
    machine: str
    cell: str
    key: str
    attempt: int = 0
    """Counts the attempts of a cell from 1, over phases and resumed runs; 0 until the journal numbers it."""
    phase: Literal["correctness", "measurement"] = "correctness"
    axes: dict[str, str]
    implementation: str | None = None
    source: str | None = None
    role: Literal["baseline", "port"] | None = None
    outcome: Outcome
    evidence: Evidence = "none"
    reason: str | None = None
    """Why the attempt was unavailable, or what broke in the tool."""
    failure: Failure | None = None
    metrics: Metrics = Metrics()
    devices: Devices = Devices()
    precision: str | None = None
    changes: Changes | None = None
    target: Target | None = None
    """Where the accelerator is absent: the chips that the attempt is about."""
    keys: dict[str, str] | None = None
    """Where the accelerator is absent: by source, the key that an execution would have now."""
    compiled: Compiled | None = None
    environment: dict[str, Any] = {}
    logs: dict[str, str] = {}
    """By rank: the file of its output, relative to the journal's folder."""
    started: str = ""
    duration_s: float | None = None
    reproduce: str = ""


class Trial(Record):
    """The port with some of its hunks taken back, run once in its cell."""

    without: list[int]
    """Ids of the hunks that were taken back; none is the port itself."""
    outcome: Outcome
    failure: Failure | None = None
    reason: str | None = None
    """Why there is no result."""
    reproduce: str = ""
    duration_s: float | None = None
    settled: bool | None = None
    """As in its attempt's metrics: False when it was still compiling at its last step."""


class Pace(Record):
    """How much slower a port is without some of its hunks, from processes that took turns."""

    base: list[int]
    """Ids of the hunks that both sides are without."""
    without: list[int]
    """Ids of the hunks that only the slower side is without."""
    slowdown: float | None = None
    """Median step time of the processes without them over that with them; None when none had a steady one."""
    p: float | None = None
    """One-sided Mann-Whitney U over processes: how often chance alone would show one as large."""
    processes: int = 0
    """Of each side."""


class HunkProof(Record):
    """One hunk of a port, and whether its cell needs it."""

    id: int
    old: tuple[int, int]
    """First and last line in the baseline, from 1; `(n + 1, n)` when it only adds, after line n."""
    new: tuple[int, int]
    """First and last line in the port, in the same way."""
    added: int
    deleted: int
    categories: dict[str, int] = {}
    """Its changed lines by category."""
    communication: int = 0
    """Its added lines that are communication code."""
    verdict: Literal["required", "performance", "idle", "unproven"]
    why: str = ""
    """One line: the failure without it, what needs it, how much slower the cell is without it."""
    failure: Failure | None = None
    """Without it."""
    together: list[int] = []
    """Idle hunks without which it cannot be taken back."""
    needed_by: list[int] = []
    """Hunks that use a name which it defines."""
    slowdown: float | None = None


class ProofRecord(Record):
    """What of a port that passed is needed in its cell; a later record of the same key takes its place."""

    kind: Literal["proof"] = "proof"
    schema_: int = Field(default=SCHEMA, alias="schema")
    run: str
    machine: str
    cell: str
    axes: dict[str, str] = {}
    key: str
    source: str
    baseline: str
    changes: Changes
    hunks: list[HunkProof] = []
    """Empty until it is complete."""
    complete: bool = False
    trials: list[Trial] = []
    paces: list[Pace] = []
    minimal: str | None = None
    """The patch that makes the smallest port which passes from the baseline, relative to the journal's folder."""
    minimal_changes: Changes | None = None
    started: str = ""


class EndRecord(Record):
    """Last record of a run that went to its end; without it a report says "partial"."""

    kind: Literal["end"] = "end"
    ended: str
    exit_code: int


AnyRecord = RunRecord | ResumeRecord | AttemptRecord | ProofRecord | EndRecord
_KINDS: dict[str, type[AnyRecord]] = {
    "run": RunRecord,
    "resume": ResumeRecord,
    "attempt": AttemptRecord,
    "proof": ProofRecord,
    "end": EndRecord,
}


@dataclass
class Journal:
    """A journal as read from disk: the run, its attempts in order, and whether it went to its end."""

    path: Path
    run: RunRecord
    attempts: list[AttemptRecord] = field(default_factory=list)
    proofs: list[ProofRecord] = field(default_factory=list)
    """Of each cell and source the newest, which is the most complete one."""
    end: EndRecord | None = None
    damaged: list[str] = field(default_factory=list)
    """Lines that could not be read, in words (a torn last line is what a `kill -9` leaves)."""

    @property
    def partial(self) -> bool:
        return self.end is None


def line(record: AnyRecord) -> str:
    """A record as one line of JSON; what UTF-8 cannot hold (bytes of a file's name, say) is written out."""
    try:
        return record.model_dump_json(exclude_none=True, by_alias=True)
    except PydanticSerializationError:
        return json.dumps(_writable(record.model_dump(exclude_none=True, by_alias=True)), default=str)


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_writable(key): _writable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class JournalError(Exception):
    """A file that is no journal of this tool."""


_RECORD: TypeAdapter[AnyRecord] = TypeAdapter(Annotated[AnyRecord, Field(discriminator="kind")])


def _parsed(line: bytes) -> AnyRecord:
    try:
        return _RECORD.validate_json(line)
    except ValidationError:  # what pydantic's own reader refuses and `json` takes, such as unpaired surrogates
        raw = json.loads(line)
        return _KINDS[raw["kind"]].model_validate(raw)


def _share(attempt: AttemptRecord, shared: dict[object, Any]) -> None:
    """Let an attempt that was just read hold equal parts in common with others: of 100,000 that halves the memory."""
    values = attempt.__dict__
    for name in ("run", "machine", "cell", "implementation", "source", "precision", "axes", "environment"):
        values[name] = shared.setdefault(repr(values[name]), values[name])
    for model in (attempt, attempt.failure, attempt.metrics, attempt.metrics.throughput, attempt.devices):
        if model is not None:
            given = model.model_fields_set
            object.__setattr__(model, "__pydantic_fields_set__", shared.setdefault(frozenset(given), given))


def read(path: Path) -> Journal:
    """Read `journal.jsonl`, or the one in a run's folder.

    Raises:
        JournalError: there is no journal, it is not UTF-8 JSON lines, or its first record is no run.
    """
    if path.is_dir():
        path = path / "journal.jsonl"
    journal: Journal | None = None
    damaged: list[str] = []
    shared: dict[object, Any] = {}
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    record = _parsed(text)
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    damaged.append(f"line {number}: {type(error).__name__}")
                    continue
                if isinstance(record, RunRecord):
                    if journal is not None:
                        raise JournalError(f"{path}:{number}: a second run record; a journal holds one run")
                    journal = Journal(path, record)
                elif journal is None:
                    raise JournalError(f"{path}:{number}: the first record is '{record.kind}', expected 'run'")
                elif isinstance(record, AttemptRecord):
                    _share(record, shared)
                    journal.attempts.append(record)
                elif isinstance(record, ProofRecord):
                    journal.proofs = with_proof(journal.proofs, record)
                elif isinstance(record, ResumeRecord):
                    journal.end = None
                    journal.run = journal.run.model_copy(
                        update={
                            name: getattr(record, name)
                            for name in ("tool", "selection", "plan", "references", "sources", "notices")
                        }
                    )
                elif isinstance(record, EndRecord):
                    journal.end = record
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror or error}") from None
    if journal is None:
        raise JournalError(f"{path}: no run record, so this is no journal of portmatrix")
    journal.damaged = damaged
    return journal


def with_proof(proofs: Iterable[ProofRecord], new: ProofRecord) -> list[ProofRecord]:
    """Some proofs, and a new one in the place of what was known of that source in that cell."""
    kept = [p for p in proofs if (p.cell, p.source, p.machine) != (new.cell, new.source, new.machine)]
    return [*kept, new]


def find(paths: Iterable[Path]) -> Iterator[Path]:
    """The journals at or below `paths`: a file itself, a run's folder, or a folder of runs (oldest first)."""
    for path in paths:
        if path.is_file():
            yield path
        elif (path / "journal.jsonl").is_file():
            yield path / "journal.jsonl"
        else:
            yield from sorted(path.glob("*/journal.jsonl"))


class Writer:
    """Appends records; each has left this process before `append` returns, so that `kill -9` loses none.

    Raises:
        ToolError: the file cannot be written, or was taken away.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                self._write(b"\n")  # a torn line of a killed run must not swallow the next record
        except OSError as error:
            raise self._error(error) from None

    def append(self, record: AnyRecord) -> None:
        """Write one record as one line, NaN and infinities as JSON strings.

        It is also synced to the disk, unless it only says that nothing can be executed: that is soon said again.
        """
        text = line(record)
        try:
            self._write(text.encode() + b"\n")
            if not (isinstance(record, AttemptRecord) and record.outcome == "unavailable"):
                os.fsync(self._file)
            there = os.stat(self.path)
        except OSError as error:
            raise self._error(error) from None
        if not os.path.samestat(there, os.fstat(self._file)):
            raise ToolError(f"{self.path} was replaced while this run wrote to it")

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def _error(self, error: OSError) -> ToolError:
        return ToolError(f"the journal {self.path} cannot be written: {error.strerror or error}")

    def close(self) -> None:
        os.close(self._file)
