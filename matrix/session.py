"""A run: its folder, its journal, what it plans, and what an earlier, interrupted run already knows."""

from __future__ import annotations

import datetime
import errno
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from matrix import accelerators, definition, environments, journal, judge, keys, plan, version
from matrix.attempt import Context, now
from matrix.backends import available
from matrix.environments import Interpreter
from matrix.errors import ToolError, UsageError
from matrix.evidence import stage
from matrix.journal import AttemptRecord, EndRecord, ProofRecord, ResumeRecord, RunRecord
from matrix.plan import Cell, Plan

MAX_SOURCE = 1 << 20  # characters of a script that a journal carries


@dataclass(frozen=True)
class Options:
    """What the command line asks of a run."""

    definition: str
    select: str = ""
    python: tuple[str, ...] = ()
    results: Path = Path("results")
    resume: bool = False
    live: bool = False
    budget_min: float | None = None
    workers: int = 1
    prove_changes: bool = False
    measure: bool = True


def make_plan(options: Options) -> Plan:
    """The selected cells of the definition."""
    found = plan.plan(definition.load(options.definition))
    return found.select(options.select) if options.select else found


def ask(options: Options, planned: Plan) -> dict[str, Interpreter]:
    """The interpreters of the plan's backends and of what its evidence needs, and what they say of themselves."""
    backends = {cell.backend.name: cell.backend for cell in planned.cells}
    compilers = stage.compilers(planned)
    names = definition.environment_names(available(), accelerators.available())
    chosen = environments.parse_python_options(options.python, names)
    named = {name: planned.definition.interpreter(name) for name in planned.definition.environments}
    defined = {name: str(path) for name, path in named.items() if path is not None}
    return environments.find(backends.values(), chosen, defined, compilers)


def context_without_run(options: Options, planned: Plan) -> Context:
    """What is needed to ask what can be shown of a plan here, without running it."""
    return Context("", environments.machine_id(), Path(), ask(options, planned), environments.host())


class Session:
    """An open run in the controller, the only process that writes the journal."""

    def __init__(self, options: Options, planned: Plan, interpreters: Mapping[str, Interpreter]):
        self.options = options
        self.plan = planned
        self.interpreters = interpreters
        self.machine = environments.machine_id()
        self.host = environments.host()
        results = options.results.absolute()
        found = self._newest(results) if options.resume else None
        self.folder = found.parent if found else self._new_folder(results)
        self.lock = filelock.FileLock(self.folder / ".lock")
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            raise UsageError(f"{self.folder}: another portmatrix is running in this folder") from None
        except OSError as error:
            raise UsageError(f"cannot write to {self.folder}: {error.strerror or error}") from None
        earlier = journal.read(found) if found else None  # now that nobody else writes to it
        self.attempts: list[AttemptRecord] = list(earlier.attempts) if earlier else []
        self.carried = len(self.attempts)
        self.proofs: list[ProofRecord] = list(earlier.proofs) if earlier else []
        self.planned = {cell.id: cell.planned() for cell in planned.cells}
        self.of_cell: dict[str, list[AttemptRecord]] = {name: [] for name in self.planned}
        for attempt in self.attempts:
            self.of_cell.setdefault(attempt.cell, []).append(attempt)
        self.run = earlier.run.run if earlier else self.folder.name
        self.data = keys.data_of(planned.cells)
        self.writer = journal.Writer(self.folder / "journal.jsonl")
        self._open(earlier)

    def _newest(self, results: Path) -> Path:
        """The journal of the newest run of this definition under the folder of results."""
        path = str(self.plan.definition.path)
        for candidate in sorted(results.glob("*/journal.jsonl"), key=_age, reverse=True):
            try:
                found = journal.read(candidate)
            except journal.JournalError:
                continue
            if found.run.definition_path == path:
                return candidate
        raise UsageError(f"--resume: there is no run of {self.plan.definition.name} under {results}")

    def _new_folder(self, results: Path) -> Path:
        name = re.sub(r"[^\w.-]+", "-", self.plan.definition.name)
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
        for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
            folder = results / f"{stamp}-{name}{suffix}"
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                kind = ToolError if error.errno == errno.ENOSPC else UsageError
                raise kind(f"cannot write results to {results}: {error.strerror}") from None
            return folder
        raise UsageError(f"{results}: there are a thousand runs of this second already")

    def _open(self, earlier: journal.Journal | None) -> None:
        cells = self._every_cell({cell.cell for cell in earlier.run.plan}) if earlier else self.plan.cells
        common: dict[str, Any] = {
            "started": now(),
            "tool": version(),
            "selection": self.plan.selection,
            "plan": [cell.planned() for cell in cells],
            "references": _references(cells),
            "sources": _sources(cells),
            "notices": list(self.plan.notices),
        }
        if earlier:
            self.writer.append(ResumeRecord(**common))
            return
        self.writer.append(
            RunRecord(
                run=self.run,
                machine=self.machine,
                definition=self.plan.definition.name,
                definition_path=str(self.plan.definition.path),
                host=self.host | {"interpreters": {n: i.as_data() for n, i in self.interpreters.items()}},
                **common,
            )
        )

    def _every_cell(self, earlier: set[str]) -> tuple[Cell, ...]:
        """The selected cells, and those of an earlier selection that the definition still has."""
        if not self.plan.chosen:
            return self.plan.cells
        return tuple(
            cell for cell in plan.plan(self.plan.definition).cells if cell.id in self.planned or cell.id in earlier
        )

    def context(self) -> Context:
        """What attempts in this process need to know."""
        prior = tuple(a for a in self.attempts[: self.carried] if a.machine == self.machine)
        return Context(
            run=self.run,
            machine=self.machine,
            folder=self.folder,
            interpreters=self.interpreters,
            host=self.host,
            prior=prior,
            live=self.options.live,
            beside=self.options.workers,
        )

    def record(self, attempt: AttemptRecord) -> AttemptRecord:
        """Number an attempt within its cell, and put it on disk."""
        own = self.of_cell.setdefault(attempt.cell, [])
        number = 1 + max((earlier.attempt for earlier in own), default=0)
        attempt = attempt.model_copy(update={"attempt": number})
        self.writer.append(attempt)
        self.attempts.append(attempt)
        own.append(attempt)
        return attempt

    def verdict(self, cell: str) -> judge.CellVerdict:
        return judge.judge([self.planned[cell]], self.of_cell[cell])[0]

    def record_proof(self, proof: ProofRecord) -> None:
        """Put what is known of a port's changes on disk."""
        self.proofs = journal.with_proof(self.proofs, proof)
        self.writer.append(proof)

    def verdicts(self) -> list[judge.CellVerdict]:
        return judge.judge(self.planned.values(), self.attempts)

    def end(self, code: int) -> None:
        """The run went to its end."""
        self.writer.append(EndRecord(ended=now(), exit_code=code))

    def close(self) -> None:
        self.writer.close()
        self.lock.release()


def _age(path: Path) -> tuple[str, int, str]:
    """Sorts journals by when their run began; of one second and definition, by the number that their folder ends in."""
    name = path.parent.name
    return name[: len("20270630T120000")], len(name), name


def _references(cells: Sequence[Cell]) -> dict[str, journal.Reference]:
    found = {}
    for cell in cells:
        if cell.implementation is not None and cell.reference is not None:
            own = cell.implementation.reference is not None
            name = f"{cell.workload.name}/{cell.implementation.name}" if own else cell.workload.name
            found[name] = cell.reference
    return found


def _sources(cells: Sequence[Cell]) -> dict[str, str]:
    found = {}
    for cell in cells:
        baseline, ports = cell.sources()
        for source in (baseline, *ports) if baseline else ():
            name = f"{cell.workload.name}/{source.name}"
            if name not in found:
                found[name] = source.file.read_text("utf-8", "replace")[:MAX_SOURCE]
    return found


def pack(session: Session) -> str:
    """What a process of pytest-xdist needs to run cells of this session, as JSON."""
    return json.dumps(
        {
            "definition": session.options.definition,
            "select": session.options.select,
            "folder": str(session.folder),
            "run": session.run,
            "machine": session.machine,
            "host": session.host,
            "workers": session.options.workers,
            "carried": session.carried,
            "data": session.data,
            "interpreters": {name: each.as_data() for name, each in session.interpreters.items()},
        },
        default=dict,
    )


def unpack(text: str) -> tuple[Plan, Context]:
    """The plan and the context that `pack` described; earlier attempts are read from the journal."""
    data = json.loads(text)
    keys.use_data(data["data"])
    planned = make_plan(Options(data["definition"], data["select"]))
    folder = Path(data["folder"])
    attempts = journal.read(folder).attempts[: data["carried"]] if data["carried"] else []
    context = Context(
        run=data["run"],
        machine=data["machine"],
        folder=folder,
        interpreters={name: Interpreter(**each) for name, each in data["interpreters"].items()},
        host=data["host"],
        prior=tuple(a for a in attempts if a.machine == data["machine"]),
        beside=data["workers"],
    )
    return planned, context
